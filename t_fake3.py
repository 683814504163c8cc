exec(open("t_fake2.py").read().split("run(False)")[0])
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
class Fake:
    def get_current_target(s): return GPUTarget("cuda",90,32)
    def get_current_device(s): return 0
    def get_current_stream(s, d=0): return 0
    def __getattr__(s,n): print("DRV",n); raise AttributeError(n)
driver.set_active(Fake())
seen.clear()
run(True)
gm,md=seen[0]
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core
from torch._inductor.fx_utils import FakeTensorUpdater
with FakeTensorMode(allow_non_fake_inputs=True):
    reinplace_inplaceable_ops_core(gm.graph)
for n in gm.graph.nodes:
    if "triton" in str(n.target): print(n.target, n.kwargs.get("tensors_to_clone"))
    elif n.op!="placeholder": print(n.target, [a.name for a in n.all_input_nodes][:12] if n.op=='output' or 'copy' in str(n.target) else '')
