// The GPU that is current on a thread, for code that hands a call to another thread.
#pragma once

namespace moelith {

// -1: there is none, or this build knows of none.
int current_gpu();
// gpu: as current_gpu says; with -1 nothing changes.
void make_gpu_current(int gpu);

}  // namespace moelith
