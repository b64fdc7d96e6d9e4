"""Changes of Inductor, while it compiles kernels or loads them."""

from __future__ import annotations

from ..patching import NEVER, Patch, methods
from .dtypes import rules_kept
from .early import kernels_started
from .folder import own_kernels
from .functions import FORMULAS, VECTORS, written
from .index_values import propagated
from .instructions import instructions_known
from .spared import body_written, loops_written_once
from .units import kernels_joined

KERNELS = (
    Patch(
        methods("torch._inductor.async_compile:AsyncCompile", "cpp_pybinding", "wait"),
        "it compiles a file for each kernel, and mostly reads the same header",
        NEVER,
        enter=kernels_joined,
    ),
    Patch(
        ("the environment: TORCHINDUCTOR_CACHE_DIR, if the user has not set it",),
        "torch keeps kernels in a folder of /tmp that others may read, or have made",
        NEVER,
        enter=own_kernels,
    ),
    Patch(
        ("torch._inductor.cpu_vec_isa.VecISA.check_build",),
        "it builds and loads a program for each set of instructions: eight seconds",
        NEVER,
        enter=instructions_known,
    ),
)
VALUES = (
    *(
        Patch(
            methods(VECTORS, name),
            "its formula loses digits near zero or overflow, or at large numbers",
            NEVER,
            new=written(name),
            is_mine=lambda: True,
        )
        for name in FORMULAS
    ),
    Patch(
        ("torch._inductor.index_propagation:IndexPropagation.propagate_sympy",),
        "casts of an arange are dropped, and a constant that is no number is an error",
        "later than 2.13",
        new=propagated,
        is_mine=lambda: True,
    ),
)
RULES = Patch(
    ("torch._inductor.dtype_propagation:DtypePropagationOpsHandler.__init__",),
    "it makes the same rules for each op of each kernel",
    NEVER,
    enter=rules_kept,
)
WRITTEN = (
    Patch(
        methods("torch._inductor.codegen.wrapper:PythonWrapperCodegen", "define_kernel"),
        "it starts the compiler when all kernels are written",
        NEVER,
        enter=kernels_started,
    ),
    Patch(
        ("torch._inductor.scheduler:SchedulerNode.codegen",),
        "it writes the rests of loops that leave none: a third of all that it writes",
        NEVER,
        new=body_written,
        is_mine=lambda: True,
    ),
    Patch(
        (
            *methods("torch._inductor.codegen.cpp:CppScheduling", "codegen_outer_loop_node"),
            *methods("torch._inductor.codegen.cpp:CppKernelProxy", "codegen_nodes"),
        ),
        "it writes loops again that it cannot put under one outer loop",
        NEVER,
        enter=loops_written_once,
    ),
)
