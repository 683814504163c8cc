import os; os.environ["TRITON_INTERPRET"]="1"
import sys, time; sys.path[:0]=["/tmp/cuda","/tmp/cuda/tests"]
import torch; torch.set_num_threads(1)
from common import *
from kvq_ops.cuda import launch
def run(name, dt, D, hq, hkv, lens, T=1, N=0, sms=None, kind="normal"):
    N=max(N,max(lens),1)
    if sms: launch.multiprocessors=lambda d: sms
    B=len(lens)
    q,k,v=make(kind,B,hq,hkv,D,max(max(lens),2))
    if T>1: q=torch.randn(B,hq,T,D)
    dtc=dt
    c=filled(name,k.to(dt),v.to(dt),lens,N)
    q=q.to(dt)
    want,wl=judge(q,c,name)
    out,lse=launch.attend(True,q,*c.needed,name,None,*c.optional)
    e=relative_error(out,want); el=(lse-wl).nan_to_num(0).abs().max().item()
    tol=TOLERANCES[name].attend[{torch.float32:'fp32',torch.float16:'fp16',torch.bfloat16:'bf16'}[dt]]
    print("OK  " if e<tol and el<1e-3 and torch.equal(lse.isinf(),wl.isinf()) else "FAIL",name,dt,D,hq,hkv,lens,T,kind,"err",f"{e:.2e}",f"{tol:.1e}","lse",f"{el:.1e}",flush=True)
if __name__=="__main__":
  for name in (sys.argv[1:] or CODINGS):
    t=time.time()
    run(name,torch.float32,64,6,2,[70,0,5])
    print(time.time()-t)
