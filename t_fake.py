import torch, sys
sys.path[:0]=["/tmp/cuda","/tmp/cuda/tests"]
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from kvq_ops import QuantizedKVCache
print('triton' in sys.modules)
import torch._functorch.aot_autograd as aa
class M(torch.nn.Module):
    def __init__(s,name):
        super().__init__(); s.cache=QuantizedKVCache(2,2,64,4096,format=name,device="cuda",dtype=torch.bfloat16)
    def forward(s,q,k,v):
        s.cache.append(k,v); return s.cache.attend(q)
with FakeTensorMode(allow_non_fake_inputs=True) as m, torch.no_grad():
    mod=M("int4_hq"); q=torch.empty(2,8,64,device="cuda",dtype=torch.bfloat16); k=torch.empty(2,2,64,device="cuda",dtype=torch.bfloat16)
    print(mod(q,k,k).shape)
    ep=torch.export.export(mod,(q,k,k)); print(ep.graph)
