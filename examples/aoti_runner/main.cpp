// Greedy decoding by a package of examples/export_aoti.py, without Python:
//
//   kvq_runner [--library FILE] [--tokens N] [--batch B] MODEL.pt2 ID...
//
// The ids are the prompt, the same for every sequence of the batch; prompt and answer go through token by token.
// Without --library, _kvq_ops.abi3.so is taken from beside this program, else from where the loader looks
// (LD_LIBRARY_PATH).
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Metadata = std::unordered_map<std::string, std::string>;
using torch::inductor::AOTIModelPackageLoader;

// Registers the ops with torch's dispatcher: the work of torch.ops.load_library.
void load_ops(std::string file) {
  const auto beside = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "_kvq_ops.abi3.so";
  if (file.empty()) {
    file = std::filesystem::exists(beside) ? beside.string() : "_kvq_ops.abi3.so";
  }
  if (dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw std::runtime_error(dlerror());
  }
}

// torch would run a package whose bytes this library does not write.
void check_version(const Metadata& metadata) {
  torch::jit::Stack stack;
  c10::Dispatcher::singleton().findSchemaOrThrow("kvq::schema_version", "").callBoxed(stack);
  const std::string version = std::to_string(stack.back().toInt());
  const auto found = metadata.find("kvq_ops.schema_version");
  const std::string got = found == metadata.end() ? "nothing" : found->second;
  if (got != version) {
    throw std::runtime_error("package: kvq_ops.schema_version must be " + version + ", got " + got +
                             ": export and compile it again");
  }
}

// Empty caches for a package that takes them as inputs: a line a part, "int8 batch 3 256 64", in the inputs' order.
std::vector<at::Tensor> make_caches(const std::string& inputs, int64_t batch) {
  static const std::unordered_map<std::string, at::ScalarType> dtypes = {
      {"int8", at::kChar},     {"uint8", at::kByte},        {"int32", at::kInt},
      {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};
  std::vector<at::Tensor> parts;
  std::istringstream lines(inputs);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string dtype, size;
    words >> dtype;
    std::vector<int64_t> shape;
    while (words >> size) {
      shape.push_back(size == "batch" ? batch : std::stoll(size));
    }
    parts.push_back(at::zeros(shape, dtypes.at(dtype)));
  }
  return parts;
}

struct Arguments {
  std::string library, model;
  int64_t tokens = 32, batch = 1;
  std::vector<int64_t> prompt;
};

Arguments parse(const std::vector<std::string>& words) {
  Arguments args;
  size_t i = 0;
  for (; i + 1 < words.size() && words[i].rfind("--", 0) == 0; i += 2) {
    if (words[i] == "--library") {
      args.library = words[i + 1];
    } else if (words[i] == "--tokens") {
      args.tokens = std::stoll(words[i + 1]);
    } else if (words[i] == "--batch") {
      args.batch = std::stoll(words[i + 1]);
    } else {
      throw std::invalid_argument(words[i] + " is no option");
    }
  }
  if (words.size() < i + 2 || args.tokens < 1 || args.batch < 1) {
    throw std::invalid_argument("usage: kvq_runner [--library FILE] [--tokens N] [--batch B] MODEL.pt2 ID...");
  }
  args.model = words[i];
  for (++i; i < words.size(); ++i) {
    args.prompt.push_back(std::stoll(words[i]));
  }
  return args;
}

void generate(const Arguments& args) {
  load_ops(args.library);
  Metadata metadata = AOTIModelPackageLoader::load_metadata_from_package(args.model, "model");
  check_version(metadata);
  if (metadata["batch"] != "any" && metadata["batch"] != std::to_string(args.batch)) {
    throw std::runtime_error("--batch must be " + metadata["batch"] + " with this package, got " +
                             std::to_string(args.batch));
  }
  AOTIModelPackageLoader package(args.model);
  std::vector<at::Tensor> inputs = {at::empty({args.batch, 1}, at::kLong), at::zeros({1}, at::kLong)};
  for (at::Tensor& part : make_caches(metadata["inputs"], args.batch)) {
    inputs.push_back(std::move(part));
  }
  const int64_t given = static_cast<int64_t>(args.prompt.size());
  std::vector<at::Tensor> chosen;
  auto begin = std::chrono::steady_clock::now();
  for (int64_t position = 0; position < given + args.tokens - 1; ++position) {
    position < given ? inputs[0].fill_(args.prompt[position]) : inputs[0].copy_(chosen.back());
    inputs[1].fill_(position);
    if (position == given - 1) {
      begin = std::chrono::steady_clock::now();
    }
    const at::Tensor logits = package.run(inputs)[0];
    if (position >= given - 1) {
      chosen.push_back(logits.argmax(-1, true));
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const at::Tensor ids = at::cat(chosen, 1);
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t i = 0; i < args.tokens; ++i) {
      std::printf("%s%lld", i == 0 ? "" : " ", static_cast<long long>(ids[b][i].item<int64_t>()));
    }
    std::printf("\n");
  }
  std::printf("%.1f tokens/s\n", static_cast<double>(ids.numel()) / seconds.count());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const c10::InferenceMode inference;
    generate(parse({argv + 1, argv + argc}));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvq_runner: %s\n", error.what());
    return 1;
  }
  return 0;
}
