"""The package as a kernel of the Hugging Face Hub: what kernel-builder needs, and builds laid out from the checkout."""
