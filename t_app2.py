exec(open("t_append.py").read().split("t0=time.time()")[0])
for name in ["int4","int4_g32","int4_g64","int8_kivi","int4_hq","int8_hq","k8v4","int4_kivi","int8/int4_hq/sinks3"]:
    for dt,D in ((torch.float32,64),(torch.bfloat16,80),(torch.float16,10),(torch.float32,130)):
        t=time.time(); r=run(name,dt,D,(70,),hkv=2); r=run(name,dt,D,(1,65),hkv=2,starts=[63,0,2])
        print(name,dt,D,round(time.time()-t,2),flush=True)
