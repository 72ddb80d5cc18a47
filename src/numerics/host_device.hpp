// Marks functions that are compiled for the host and, under nvcc, for the device as well.
#pragma once

#if defined(__CUDACC__)
#define MOELITH_HD __host__ __device__
#else
#define MOELITH_HD
#endif
