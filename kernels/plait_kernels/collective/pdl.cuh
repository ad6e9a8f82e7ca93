// PDL, where it is defined: a kernel begins before the one before it has ended.
#pragma once

__device__ void wait_for_the_kernel_before() {
#ifdef PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ void let_the_next_kernel_begin() {
#ifdef PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
