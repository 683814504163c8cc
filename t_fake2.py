import torch, sys
sys.path[:0]=["/tmp/cuda","/tmp/cuda/tests"]
from torch._subclasses.fake_tensor import FakeTensorMode
from kvq_ops import QuantizedKVCache
from torch._dynamo.backends.common import aot_autograd
class M(torch.nn.Module):
    def __init__(s,name):
        super().__init__(); s.cache=QuantizedKVCache(2,2,64,4096,format=name,device="cuda",dtype=torch.bfloat16)
    def forward(s,q,k,v):
        s.cache.append(k,v); return s.cache.attend(q)
seen=[]
def fw(gm, inputs):
    c=torch._guards.TracingContext.get()
    seen.append((gm, c.fw_metadata))
    return gm.forward
def run(dec):
  seen.clear(); torch._dynamo.reset()
  with FakeTensorMode(allow_non_fake_inputs=True) as m, torch.no_grad(), torch._functorch.config.patch(decompose_custom_triton_ops=dec):
    mod=M("int4_hq"); q=torch.empty(2,8,64,device="cuda",dtype=torch.bfloat16); k=torch.empty(2,2,64,device="cuda",dtype=torch.bfloat16)
    try: torch.compile(mod,fullgraph=True,backend=aot_autograd(fw_compiler=fw,inference_compiler=fw))(q,k,k)
    except Exception as e: print("EXC",type(e),str(e)[:600])
  for gm,md in seen:
    for n in gm.graph.nodes: print(n.op,n.target, n.name if n.op=='placeholder' else '')
    print(md.mutated_inp_runtime_indices, md.static_input_indices)
run(False); run(True)
