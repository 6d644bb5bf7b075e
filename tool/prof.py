import cProfile, pstats, emit, time
t=time.time()
pr=cProfile.Profile(); pr.enable()
e=emit.Edition()
for i in emit.STEPS[60:62]: e.files(i)
pr.disable(); print(time.time()-t)
pstats.Stats(pr).sort_stats("cumtime").print_stats(25)
