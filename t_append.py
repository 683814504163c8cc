import os; os.environ["TRITON_INTERPRET"]="1"
import sys, time; sys.path[:0]=["/tmp/cuda","/tmp/cuda/tests"]
import torch; torch.set_num_threads(1)
from common import *
from kvq_ops.cuda import launch
def by(*a): launch.append(*a)
def run(name, dt, D, steps, hkv=3, N=None, starts=None):
    g=torch.Generator().manual_seed(D)
    B=3
    N = N or 200
    a=empty(name,B,hkv,D,N,dt); b=a.clone()
    if starts:  # ragged by reference
        for i,s in enumerate(starts):
            if s:
                k,v=torch.randn(2,1,hkv,s,D,generator=g).to(dt); append(a.sequence(i),k,v,name,reference.append)
        b=a.clone()
    for T in steps:
        k=torch.randn(B,hkv,T,D,generator=g)*torch.randn(B,hkv,T,1,generator=g).exp(); v=torch.randn(B,hkv,T,D,generator=g)
        k[0,0,0]=0; v[1,1,-1]=0; v[0,1,0,3]=float('nan'); k[1,0,0,2]=float('inf'); k[2,-1,0]*=1e30;v[2,-1,0]*=1e-42
        k,v=k.to(dt),v.to(dt)
        append(a,k,v,name,reference.append); append(b,k,v,name,by)
        try: assert_same_bits(b,a)
        except AssertionError as e:
            print("FAIL",name,dt,D,T,e); return b,a
    return None
t0=time.time()
for name in (sys.argv[1:] or FORMAT_NAMES):
    for dt in (torch.float32,torch.bfloat16,torch.float16):
        for D in (64,80,10,130):
            t=time.time(); run(name,dt,D,(70,1,3,1)); run(name,dt,D,(1,65),starts=[63,0,2])
            if dt==torch.float32: print(name,D,round(time.time()-t,2),flush=True)
print(time.time()-t0)
