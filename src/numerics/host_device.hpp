// Marks functions that are compiled for the host and, under nvcc, for the device as well.
#pragma once

#if defined(__CUDACC__)
#define MOELITH_HD __host__ __device__
#define MOELITH_HD_INLINE __host__ __device__ __forceinline__
#else
#define MOELITH_HD
// For small arithmetic functions. Always inlined, because they are also called from files that are compiled for newer
// instruction sets: no out-of-line copy may exist that the linker could hand to code for older machines.
#define MOELITH_HD_INLINE inline __attribute__((always_inline))
#endif
