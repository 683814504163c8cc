"""kvq_ops in programs that others wrote: `rewrite` swaps the caches of exported ones, `package` marks
models with a version, `distributed` shards caches, `transformers` brings them to Hugging Face's models."""
