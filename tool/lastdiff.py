import emit, os, subprocess, shutil
from try1 import write, Others, rows
e=emit.Edition(); oth=Others()
write(e, oth, rows[-1][0], "/dev/shm/last/")
