"""The kernel of the Hugging Face Hub: its sources, and a build that `kernels` loads without a network."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kvq_ops
from hub import layout
from kvq_ops.native import MIN_TORCH

kernels = pytest.importorskip("kernels", reason="kernels is not installed: `make test` installs it")
tomlkit = pytest.importorskip("tomlkit", reason="tomlkit, which kernels needs, is not installed")

ROOT = Path(__file__).parents[1]
REPOSITORY = "someone/kvq-ops"
FORMATS = ["int8", "int4_g32", "int8_hq", "int4_kivi"]
BUILD = tomlkit.parse((ROOT / "hub/build.toml").read_text()).unwrap()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (layout.NATIVE / "compile_commands.json").is_file():
        pytest.skip("build/native holds no objects: the library was not built by `make build`")
    out = tmp_path_factory.mktemp("hub") / "kvq-ops"
    layout.main([str(out)])
    return out


@pytest.fixture(scope="module")
def kernel(repository: Path) -> ModuleType:
    return kernels.get_local_kernel(repository)


def variant(repository: Path, backend: str) -> Path:
    (found,) = repository.glob(f"build/torch*-{backend}*")
    return found


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_no_c_functions(kernel: ModuleType) -> None:
    """Of those a process can have one set, and the pip package has it."""
    assert kernel.C_SHIMS == {}


def decode(package: ModuleType, format: str) -> Tensor:
    """A prompt of 150 tokens and a step, 2 sequences, 6 query heads over 2."""
    cache = package.QuantizedKVCache(2, 2, 64, 200, format=format, dtype=torch.float32)
    with torch.inference_mode():
        cache.append(rows(2, 2, 150, 64), rows(2, 2, 150, 64) + 1)
        cache.append(rows(2, 2, 64), rows(2, 2, 64) + 1)
        return cache.attend(rows(2, 6, 64))


def test_build_toml_is_what_the_kernels_parser_takes(repository: Path) -> None:
    build = kernels._rust.Build.open(repository)
    assert [str(backend) for backend in build.general.backends] == BUILD["general"]["backends"] == ["cpu", "cuda"]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [('name = "kvq-ops"', 'name = "kvq_ops"'), ("edition = 5", "edition = 4"), ('backend = "cpu"', 'backend = "cpi"')],
)
def test_parser_refuses_others(tmp_path: Path, line: str, wrong: str) -> None:
    text = (ROOT / "hub/build.toml").read_text()
    assert text.count(line) == 1
    (tmp_path / "build.toml").write_text(text.replace(line, wrong))
    with pytest.raises(ValueError, match="Cannot parse build configuration"):
        kernels._rust.Build.open(tmp_path)


def test_build_toml_and_layout_agree() -> None:
    general = BUILD["general"]
    assert (general["name"], general["version"], general["license"]) == (layout.NAME, layout.VERSION, layout.LICENSE)
    assert BUILD["torch"]["stable-abi"] == {"cpu": "{}.{}".format(*MIN_TORCH)}
    assert "{}{}".format(*MIN_TORCH) == layout.STABLE_ABI


def test_build_toml_lists_every_source(repository: Path) -> None:
    """kernel-builder sees no other files; of Python it takes all under torch-ext."""
    listed = [*BUILD["torch"]["src"], *(name for kernel in BUILD["kernel"].values() for name in kernel["src"])]
    assert len(listed) == len(set(listed))
    there = {path.relative_to(repository).as_posix() for ext in ("h", "cpp") for path in repository.rglob(f"*.{ext}")}
    assert set(listed) == there
    python = {path.name for path in (repository / "torch-ext/kvq_ops").glob("*.py")}
    assert {"__init__.py", "layers.py", "cache.py"} <= python
    assert "_ops.py" not in python, "kernel-builder writes its own"


def test_instruction_sets_of_other_machines_are_empty(tmp_path: Path) -> None:
    """kernel-builder compiles every file on every machine. And headers go by the file, not by the compiler's macros."""
    csrc, foreign = ROOT / "kvq_ops/csrc/cpu", {"x86_64": "neon", "aarch64": "avx"}[platform.machine()]
    files = sorted(csrc.glob(f"isa_{foreign}*.cpp"))
    assert len(files) >= 2
    for path in files:
        subprocess.run(["c++", "-std=c++17", "-c", path, "-o", tmp_path / "empty.o"], check=True)
        assert subprocess.run(["nm", tmp_path / "empty.o"], check=True, capture_output=True).stdout == b""
    asked = {
        path.name for path in csrc.glob("*.h") if re.search(r"__AVX|__FMA__|__F16C__|__ARM_FEATURE", path.read_text())
    }
    assert asked == set()


def test_library_needs_torch_and_the_limited_api(repository: Path) -> None:
    library = next(variant(repository, "cpu").glob("*.so"))
    told = subprocess.run(["nm", "-DC", "--undefined-only", library], check=True, capture_output=True, text=True).stdout
    symbols = [line.split(maxsplit=1)[1] for line in told.splitlines()]
    assert [name for name in symbols if name.startswith(("Py", "_Py"))] == ["PyModule_Create2"]
    assert any(name.startswith("aoti_torch_") for name in symbols)
    assert [name for name in symbols if re.search(r"\b(at|c10|caffe2|torch)::", name)] == []


def test_metadata(repository: Path) -> None:
    for backend in ("cpu", "cuda"):
        folder = variant(repository, backend)
        metadata = kernels.Metadata.read_from_file(folder / "metadata.json")
        assert (str(metadata.name), metadata.version, metadata.license) == ("kvq-ops", 1, "Apache-2.0")
        assert metadata.backend.backend_type == kernels._rust.Backend.from_str(backend)
        assert re.fullmatch(rf"_kvq_ops_{backend}_[0-9a-f]{{7}}", metadata.id)
        assert metadata.python_depends == []
        digest = kernels._rust.Digest.hash_variant(kernels._rust.DigestAlgorithm.SHA256, folder)
        metadata.digest.validate(digest)
        (folder / "stray.py").touch()
        with pytest.raises(kernels._rust.DigestValidationError):
            metadata.digest.validate(kernels._rust.Digest.hash_variant(kernels._rust.DigestAlgorithm.SHA256, folder))
        (folder / "stray.py").unlink()


def test_namespace_follows_the_sources(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "format.py"
    changed.write_text((ROOT / "kvq_ops/format.py").read_text() + "\n")
    before, sources = layout.namespace("cpu"), list(layout.sources())
    assert before == kernels.Metadata.read_from_file(variant(repository, "cpu") / "metadata.json").id
    others = [(name, changed if path.name == "format.py" else path) for name, path in sources]
    monkeypatch.setattr(layout, "sources", lambda: iter(others))
    assert layout.namespace("cpu") != before


@pytest.mark.parametrize("format", FORMATS)
def test_local_kernel_gives_the_packages_bits(kernel: ModuleType, format: str) -> None:
    """Beside the pip package in one process, each in a namespace of its own."""
    assert kernel.append is not kvq_ops.append
    assert kernel.QuantizedKVCache.__module__.startswith("_kvq_ops_cpu_")
    assert torch.equal(decode(kernel, format), decode(kvq_ops, format))
    assert kernel.cpu_isa() == kvq_ops.cpu_isa()


def test_kernel_leaves_the_packages_namespace_alone(repository: Path) -> None:
    """Loaded without the package: all its ops are in its own namespace."""
    script = (
        "import sys, torch; from pathlib import Path; import kernels\n"
        "kv = kernels.get_local_kernel(Path(sys.argv[1]))\n"
        "assert kv.library_path().parent == Path(kv.__file__).parent, kv.library_path()\n"
        "assert 'numpy' not in {name.partition('.')[0] for name, module in sys.modules.items()\n"
        "                       if (getattr(module, '__name__', '') or '').startswith(kv.__name__)}\n"
        "schemas = {schema.name for schema in torch._C._jit_get_all_schemas() if 'kvq' in schema.name}\n"
        "print(*sorted(name.replace(kv.__name__, '<id>') for name in schemas))\n"
    )
    told = run(script, repository)
    assert told.split() == [f"<id>::{name}" for name in ("append", "attend", "attend_lse", "cpu_isa", "schema_version")]


def run(script: str, *arguments: Path, **environment: str) -> str:
    """The output of a Python without the checkout and without a network's kernels."""
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **environment}
    done = subprocess.run(
        command, check=False, env=os.environ | offline, capture_output=True, text=True, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_get_kernel(repository: Path) -> None:
    """By the name that users type, redirected by LOCAL_KERNELS: cache, append, attend."""
    script = (
        "import torch\nfrom kernels import get_kernel, has_kernel\n"
        f"assert has_kernel('{REPOSITORY}', version=1, trust_remote_code=True)\n"
        f"kv = get_kernel('{REPOSITORY}', version=1, trust_remote_code=True)\n"
        "cache = kv.QuantizedKVCache(1, 1, 64, 8, bits=4, dtype=torch.float32)\n"
        "ones = torch.ones(1, 1, 64)\n"
        "cache.append(ones, ones)\nprint(cache.attend(ones).mean().item())\n"
    )
    mean = run(script, LOCAL_KERNELS=f"{REPOSITORY}={repository}")
    assert abs(float(mean) - 1) < 2e-4


def test_errors_name_the_op(kernel: ModuleType) -> None:
    cache = kernel.QuantizedKVCache(1, 1, 64, 8)
    for mode in (torch.no_grad(), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)):
        with (
            mode,
            pytest.raises(RuntimeError, match=r"^kvq::append: key must be float32, bfloat16 or float16, got int8"),
        ):
            cache.append(torch.ones(1, 1, 64, dtype=torch.int8), torch.ones(1, 1, 64, dtype=torch.int8))
    query = torch.ones(1, 1, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^kvq::attend: query must not need a gradient, got a backward pass"):
        cache.attend(query).sum().backward()


@kernels.use_kernel_forward_from_hub("CachedAttention")
class PlainAttention(torch.nn.Module):
    """A model's layer: attention over the newest token alone, which no kernel computes."""

    def __init__(self, cache: torch.nn.Module) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + key.mean() + value.mean()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kernelized_layer(repository: Path, kernel: ModuleType, compiled: bool) -> None:
    layer = PlainAttention(kernel.QuantizedKVCache(2, 2, 64, 8, dtype=torch.float32))
    expected = kvq_ops.QuantizedKVCache(2, 2, 64, 8, dtype=torch.float32)
    mapping = {
        "CachedAttention": {"cpu": kernels.LocalLayerRepository(repository, layer_name="CachedAttention")},
    }
    mode = kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        layer = kernels.kernelize(layer.eval(), mode=mode, device="cpu", use_fallback=False)
    torch.compiler.reset()
    step = torch.compile(layer, fullgraph=True) if compiled else layer
    with torch.no_grad():
        for token in range(3):
            query, key, value = rows(2, 6, 64) * (token + 1), rows(2, 2, 64) - token, rows(2, 2, 64) + token
            expected.append(key, value)
            assert torch.equal(step(query, key, value), expected.attend(query))
    assert layer.cache.lengths.tolist() == [3, 3]


def test_layers_are_what_kernelize_takes() -> None:
    """Stateless: the class has no member but what the kernels package reads."""
    members = set(vars(kvq_ops.layers.CachedAttention)) - set(vars(torch.nn.Module))
    assert members <= {"can_torch_compile", "has_backward"}
    assert kvq_ops.layers.CachedAttention.can_torch_compile
    assert not kvq_ops.layers.CachedAttention.has_backward


@pytest.fixture(scope="module")
def cuda_build(repository: Path) -> ModuleType:
    """The build for CUDA, imported as the loader does, which without a GPU would not choose it."""
    return kernels.importer._import_from_path(variant(repository, "cuda"), {})


def test_loader_rejects_the_cuda_build_here(repository: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA, so the loader takes that build")
    decisions = kernels.variants.resolve_variants(kernels.variants.get_variants_local(repository / "build"))[1]
    taken = {decision.variant.variant_str: isinstance(decision, kernels.VariantAccepted) for decision in decisions}
    assert taken == {variant(repository, "cpu").name: True, "torch-cuda": False}


def test_cuda_build_has_the_same_ops(cuda_build: ModuleType) -> None:
    """Its schemas are defined in Python, since it has no compiled library."""
    ops = getattr(torch.ops, cuda_build.__name__)
    for name in ("append", "attend", "attend_lse"):
        schema = str(getattr(torch.ops.kvq, name).default._schema)
        assert str(getattr(ops, name).default._schema) == schema.replace("kvq::", f"{cuda_build.__name__}::")
        assert torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags


def test_cuda_build_refuses_the_cpu(cuda_build: ModuleType) -> None:
    cache = cuda_build.QuantizedKVCache(1, 1, 64, 8)
    with pytest.raises(RuntimeError, match=r"^kvq::append: tensors must be on a GPU in a build without CPU kernels"):
        cache.append(torch.ones(1, 1, 64), torch.ones(1, 1, 64))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"^kvq::attend: tensors must be on a GPU"):
        cache.attend(torch.ones(1, 1, 64))
    with pytest.raises(RuntimeError, match=r"^cpu_isa: the build must have CPU kernels, got one for CUDA"):
        cuda_build.cpu_isa()
    with pytest.raises(ImportError, match="found: nothing"):
        cuda_build.library_path()


def test_cuda_build_traces(cuda_build: ModuleType) -> None:
    """Export of a step over fake CUDA tensors holds the build's own ops, and compile caches hash its kernels."""
    pytest.importorskip("triton", reason="triton is not installed: CUDA tensors are refused")
    name = cuda_build.__name__
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        layer = PlainAttention(cuda_build.QuantizedKVCache(2, 2, 64, 128, format="int8_hq", device="cuda"))
        layer.forward = cuda_build.layers.CachedAttention.forward.__get__(layer)
        query, key = (torch.empty(2, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
        program = torch.export.export(layer, (query, key, key))
    calls = [str(node.target) for node in program.graph.nodes if name in str(node.target)]
    assert calls == [f"{name}.append.default", f"{name}.attend.default"]
    from torch._library.triton import triton_ops_to_kernels

    assert [kernel.fn.__name__ for kernel in triton_ops_to_kernels[f"{name}::attend"]] == [
        "attend_kernel",
        "combine_kernel",
    ]


def test_card(repository: Path) -> None:
    """Its code runs as it stands, but for the name of the organization."""
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "hub/CARD.md").read_text(), re.DOTALL)
    check = "assert out.shape == layer(query, key, value).shape == (2, 32, 128)\nprint(layer.cache.lengths)"
    # Only the Hub knows which revision a version of a layer's repository is.
    mapping = second.replace("version=1, trust_remote_code=True)}}", 'revision="v1", trust_remote_code=True)}}')
    assert mapping != second
    script = (first + mapping + check).replace("<org>/kvq-ops", REPOSITORY)
    said = run(script, LOCAL_KERNELS=f"{REPOSITORY}={repository}")
    assert said == "tensor([1, 1], dtype=torch.int32)\n"


@pytest.mark.slow
def test_listed_sources_build(repository: Path, tmp_path: Path) -> None:
    """As kernel-builder compiles them: all files of a section with its flags, none with an instruction set's."""
    name = layout.namespace("cpu")
    includes = [f"-I{repository / folder}" for folder in BUILD["torch"]["include"]]
    torch_root = Path(torch.__file__).parent
    common = ["-std=c++17", "-fPIC", "-DNDEBUG", f"-DTORCH_EXTENSION_NAME={name}", "-DPy_LIMITED_API=0x030a0000"]
    common += ["-DTORCH_TARGET_VERSION=0x020b000000000000", f"-isystem{torch_root / 'include'}"]
    common += [f"-I{sysconfig.get_path('include')}", *includes]
    objects = []
    for section in (BUILD["torch"], BUILD["kernel"]["kvq_cpu"]):
        assert not any(flag.startswith("-m") for flag in section["cxx-flags"])
        for source in (source for source in section["src"] if source.endswith(".cpp")):
            objects.append(tmp_path / (source.replace("/", "_") + ".o"))
            command = ["c++", *common, *section["cxx-flags"], "-c", str(repository / source), "-o", str(objects[-1])]
            subprocess.run(command, check=True)
    library = variant(repository, "cpu") / f"{name}.abi3.so"
    laid_out = library.read_bytes()
    library.unlink()
    subprocess.run(["c++", "-shared", "-o", library, *objects, torch_root / "lib/libtorch_cpu.so"], check=True)
    script = (
        "import sys, torch; from pathlib import Path; import kernels\n"
        "kv = kernels.get_local_kernel(Path(sys.argv[1]))\n"
        "cache = kv.QuantizedKVCache(1, 1, 64, 8, dtype=torch.float32)\n"
        "ones = torch.ones(1, 1, 64)\n"
        "cache.append(ones, ones)\nprint(kv.cpu_isa(), cache.attend(ones).mean().item())\n"
    )
    isa, mean = run(script, repository).split()
    library.write_bytes(laid_out)
    assert isa == kvq_ops.cpu_isa()
    assert abs(float(mean) - 1) < 2e-4


ATTENTION = """
import inspect, torch, kernels
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, initializer_range=0.15, eos_token_id=None, pad_token_id=0)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).eval().requires_grad_(False)
kv = kernels.get_kernel(REPOSITORY, version=1, trust_remote_code=True)
ids = torch.randint(1, 128, (3, 14), generator=torch.Generator().manual_seed(0))
mask = torch.ones_like(ids)
for b, padding in enumerate(PADDING):
    ids[b, :padding], mask[b, :padding] = 0, 0

def logits(implementation, cache):
    model.set_attn_implementation(implementation, allow_all_kernels=True)
    found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6,
                           return_dict_in_generate=True, output_logits=True, **{ARGUMENT: cache})
    return found.sequences, torch.stack(found.logits)

ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
name = REPOSITORY + ":kvq_attention"
for skipped in ((), (1,)):
    tokens, hub = logits(name, kv.KVQCache(model.config, 64, "int8_hq", skip_layers=skipped))
    assert model.config._attn_implementation == name
    assert torch.equal(hub, logits("kvq", kv.KVQCache(model.config, 64, "int8_hq", skip_layers=skipped))[1])
expected_tokens, expected = logits("sdpa", DynamicCache(config=model.config))
# A row is judged until its first other token, which must have been a near tie.
equal = (tokens == expected_tokens)[:, ids.size(1):].T
same_past = torch.cat([torch.ones_like(equal[:1]), equal[:-1].cumprod(0).bool()])
best = expected.topk(2, -1).values
tie = best[..., 0] - best[..., 1] <= 2 * (hub - expected).abs().amax(-1)
assert (equal | tie)[same_past].all() and same_past[-1].sum() >= 2, (tokens, expected_tokens)
print(float((hub - expected)[same_past].norm() / expected[same_past].norm()))

model.set_attn_implementation(name, allow_all_kernels=True)
whole = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
assert torch.allclose(whole, expected[0], atol=1e-3), (whole - expected[0]).abs().max()
"""


@pytest.mark.parametrize("padding", [(0, 0, 0), (5, 0, 2)], ids=["whole", "padded"])
def test_attention_implementation(repository: Path, padding: tuple[int, ...]) -> None:
    """transformers takes the function by its name, gives it the masks of flash attention, and no padding gets lost."""
    # The installed one, or what `make test` puts into a folder: each takes some versions of kernels only.
    for folder in ["", *map(str, ROOT.glob("build/transformers-*"))]:
        if run("import transformers.utils as t; print(t.is_kernels_available())", PYTHONPATH=folder) == "True\n":
            break
    else:
        pytest.skip(f"no transformers that is here takes kernels {kernels.__version__}")
    script = f"REPOSITORY, PADDING = {REPOSITORY!r}, {padding}\n" + ATTENTION
    said = run(script, LOCAL_KERNELS=f"{REPOSITORY}={repository}", PYTHONPATH=folder)
    assert 1e-5 < float(said) < 0.025
