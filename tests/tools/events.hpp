// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/kokkos_compat.hpp>

#include <Kokkos_Core.hpp>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

/// \file events.hpp
/// What Kokkos tells a profiling tool while an object of class Recording exists.

namespace LinAttn::test_support {

struct Event {
  enum class Kind { kernel, region, end_of_region, allocation, release, copy, fence };
  Kind kind;
  std::string label;
  std::uint32_t device = 0;  ///< kernels and fences: execution space and instance
  std::uint64_t bytes = 0;   ///< allocations, releases and copies
};

/// Which callbacks to register. Those of kernels make Kokkos fence around every kernel, so fences
/// are counted without them.
enum class Watch { kernels_and_memory, fences_and_memory };

namespace detail {

inline std::vector<Event>*& sink() {
  static std::vector<Event>* events = nullptr;
  return events;
}
inline void note(Event event) {
  if (sink() != nullptr) sink()->push_back(std::move(event));
}

using Kind = Event::Kind;

inline void kernel(const char* label, const std::uint32_t device, std::uint64_t* id) {
  *id = 0;
  note({Kind::kernel, label, device});
}
inline void push(const char* label) { note({Kind::region, label}); }
inline void pop() { note({Kind::end_of_region, ""}); }
inline void allocate(const Kokkos_Profiling_SpaceHandle, const char* label, const void*,
                     const std::uint64_t bytes) {
  note({Kind::allocation, label, 0, bytes});
}
inline void release(const Kokkos_Profiling_SpaceHandle, const char* label, const void*,
                    const std::uint64_t bytes) {
  note({Kind::release, label, 0, bytes});
}
inline void copy(Kokkos_Profiling_SpaceHandle, const char* to, const void*,
                 Kokkos_Profiling_SpaceHandle, const char*, const void*, std::uint64_t bytes) {
  note({Kind::copy, to, 0, bytes});
}
inline void fence(const char* label, const std::uint32_t device, std::uint64_t* id) {
  *id = 0;
  if (std::strstr(label, "Kokkos Profile Tool Fence") == nullptr)
    note({Kind::fence, label, device});
}

}  // namespace detail

/// Records events from its construction to its destruction; one at a time.
class Recording {
 public:
  explicit Recording(Watch watch) {
    namespace Tools = Kokkos::Tools::Experimental;
    detail::sink() = &m_events;
    if (watch == Watch::kernels_and_memory) {
      Tools::set_begin_parallel_for_callback(detail::kernel);
      Tools::set_begin_parallel_reduce_callback(detail::kernel);
      Tools::set_begin_parallel_scan_callback(detail::kernel);
      Tools::set_push_region_callback(detail::push);
      Tools::set_pop_region_callback(detail::pop);
    } else {
      Tools::set_begin_fence_callback(detail::fence);
    }
    Tools::set_allocate_data_callback(detail::allocate);
    Tools::set_deallocate_data_callback(detail::release);
    Tools::set_begin_deep_copy_callback(detail::copy);
  }
  ~Recording() {
    namespace Tools = Kokkos::Tools::Experimental;
    Tools::set_begin_parallel_for_callback(nullptr);
    Tools::set_begin_parallel_reduce_callback(nullptr);
    Tools::set_begin_parallel_scan_callback(nullptr);
    Tools::set_push_region_callback(nullptr);
    Tools::set_pop_region_callback(nullptr);
    Tools::set_begin_fence_callback(nullptr);
    Tools::set_allocate_data_callback(nullptr);
    Tools::set_deallocate_data_callback(nullptr);
    Tools::set_begin_deep_copy_callback(nullptr);
    detail::sink() = nullptr;
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  const std::vector<Event>& events() const { return m_events; }

  std::vector<Event> of(Event::Kind kind) const {
    std::vector<Event> result;
    for (const Event& event : m_events)
      if (event.kind == kind) result.push_back(event);
    return result;
  }

  /// Largest number of bytes that were allocated at once.
  std::uint64_t peak_bytes() const {
    std::uint64_t now = 0, peak = 0;
    for (const Event& event : m_events) {
      if (event.kind == Event::Kind::allocation) now += event.bytes;
      if (event.kind == Event::Kind::release) now -= event.bytes < now ? event.bytes : now;
      peak = now > peak ? now : peak;
    }
    return peak;
  }

 private:
  std::vector<Event> m_events;
};

using LinAttn::detail::another_instance;
using LinAttn::detail::reports_fences;

/// The number by which tools know an instance.
template <class ExecSpace>
std::uint32_t device_id(const ExecSpace& exec) {
  return Kokkos::Tools::Experimental::device_id(exec);
}

}  // namespace LinAttn::test_support
