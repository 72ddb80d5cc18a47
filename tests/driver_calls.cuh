// What a piece of code asks of CUDA, call by call, as the profiling interface CUPTI reports it. CUPTI comes with the
// toolkit; where it is missing, available() is false.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <string>
#include <vector>

#if __has_include(<cupti.h>)
#include <cupti.h>
#define MOELITH_TEST_CUPTI 1
#else
#define MOELITH_TEST_CUPTI 0
#endif
#ifndef MOELITH_CUPTI_LIBRARY
#define MOELITH_CUPTI_LIBRARY ""  // where CMake has found it
#endif

namespace moelith::test {

class DriverCalls {
 public:
  static DriverCalls& instance() {
    static DriverCalls calls;
    return calls;
  }
  bool available() const { return available_; }
  // Names of the driver's and the runtime's functions that this thread calls meanwhile, in order.
  template <class F>
  std::vector<std::string> during(F&& code) {
    names_.clear();
    recording_ = true;
    code();
    recording_ = false;
    return names_;
  }

 private:
  bool available_ = false;
  std::vector<std::string> names_;
  static inline thread_local bool recording_ = false;

#if MOELITH_TEST_CUPTI
  static void CUPTIAPI called(void* self, CUpti_CallbackDomain domain, CUpti_CallbackId, const void* data) {
    if (!recording_ || (domain != CUPTI_CB_DOMAIN_DRIVER_API && domain != CUPTI_CB_DOMAIN_RUNTIME_API)) return;
    const auto* call = static_cast<const CUpti_CallbackData*>(data);
    if (call->callbackSite == CUPTI_API_ENTER) static_cast<DriverCalls*>(self)->names_.emplace_back(call->functionName);
  }
  DriverCalls() {
    void* library = nullptr;
    for (const char* name : {MOELITH_CUPTI_LIBRARY, "libcupti.so.13", "libcupti.so.12", "libcupti.so"}) {
      if (*name && !library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (!library) return;
    const auto subscribe = reinterpret_cast<decltype(&cuptiSubscribe)>(dlsym(library, "cuptiSubscribe"));
    const auto enable = reinterpret_cast<decltype(&cuptiEnableDomain)>(dlsym(library, "cuptiEnableDomain"));
    CUpti_SubscriberHandle subscriber;
    available_ = subscribe && enable && subscribe(&subscriber, called, this) == CUPTI_SUCCESS &&
                 enable(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API) == CUPTI_SUCCESS &&
                 enable(1, subscriber, CUPTI_CB_DOMAIN_RUNTIME_API) == CUPTI_SUCCESS;
  }
#endif
};

}  // namespace moelith::test
