"""`python interpreted_check.py FAULT --job ...`: a job of `ttcd_kernels.check` with the Triton
kernels in Triton's interpreter, one of them broken on purpose."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton_interpreter
from ttcd_kernels import check, launch

_COTANGENTS = 5  # the operand [2, B, T, N, H] of both backward kernels: near band, far band


def broken(fault, kernel, *args, **options):
    args, name = [*args], kernel.__name__
    if (fault, name) == ("sign", "dual_window_backward_kv"):
        args[_COTANGENTS] = args[_COTANGENTS].at[1].multiply(-1)
    results = triton_interpreter.launch(kernel, *args, **options)
    if (fault, name) == ("row", "dual_window_forward"):
        results[0] = results[0].at[0, 7].set(np.nan)
    return results


if __name__ == "__main__":
    triton_interpreter.install()
    fault, *arguments = sys.argv[1:]
    launch.launch = lambda *args, **options: broken(fault, *args, **options)
    with launch.compiling_for(90):
        check.main(arguments)
