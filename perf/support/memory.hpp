// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <linattn/kokkos_compat.hpp>
#include <string>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

/// \file memory.hpp
/// Bytes in use by two means: what Kokkos tells a profiling tool of its allocations, and what Linux
/// tells of the process.

namespace LinAttn::perf {

/// A field of a file in /proc in bytes, 0 where there is none.
inline double proc_bytes(const char* path, const std::string& field) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.rfind(field + ":", 0) == 0) return 1024 * std::stod(line.substr(field.size() + 1));
  return 0;
}
inline double process_bytes(const std::string& field) {
  return proc_bytes("/proc/self/status", field);
}

/// From now on large blocks are new pages, and go when they are freed.
inline void return_freed_pages() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 1 << 16);
  malloc_trim(0);
#endif
}

/// Whether that was possible.
inline bool forget_process_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::endl;
  return bool(file);
}

/// Growth of the resident memory during f over what it was before, at its peak; -1 where unknown.
/// Linux counts in lots of 64 pages a thread.
template <class F>
double peak_growth(const F& f) {
  f();  // whatever a first call leaves behind
  return_freed_pages();
  forget_process_peak();
  const double before = process_bytes("VmRSS");
  f();
  const double peak = process_bytes("VmHWM");
  return before > 0 && peak >= before ? peak - before : -1;
}

/// Counts bytes while it exists; one at a time. Allocations come from one thread.
class Meter {
 public:
  /// By the hooks of Kokkos, and resident in the process.
  struct Bytes {
    double hooks = 0, process = 0;
    friend Bytes operator-(const Bytes& a, const Bytes& b) {
      return {a.hooks - b.hooks, a.process - b.process};
    }
  };

  Meter() {
    namespace Tools = Kokkos::Tools::Experimental;
    count() = {};
    Tools::set_allocate_data_callback(allocate);
    Tools::set_deallocate_data_callback(release);
    return_freed_pages();
    m_knows_process = forget_process_peak() && process_bytes("VmHWM") > 0;
  }
  ~Meter() {
    namespace Tools = Kokkos::Tools::Experimental;
    Tools::set_allocate_data_callback(nullptr);
    Tools::set_deallocate_data_callback(nullptr);
  }
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

  /// Whether this system tells of the process at all.
  bool knows_process() const { return m_knows_process; }
  Bytes now() const { return {static_cast<double>(count().now), process_bytes("VmRSS")}; }
  /// The most there was at once during f.
  template <class F>
  Bytes peak(const F& f) const {
    count().peak = count().now;
    forget_process_peak();
    f();
    return {static_cast<double>(count().peak), process_bytes("VmHWM")};
  }

 private:
  struct Count {
    std::int64_t now = 0, peak = 0;
  };
  static Count& count() {
    static Count the_count;
    return the_count;
  }
  static void allocate(const Kokkos_Profiling_SpaceHandle, const char*, const void*,
                       const std::uint64_t bytes) {
    count().now += static_cast<std::int64_t>(bytes);
    count().peak = std::max(count().peak, count().now);
  }
  static void release(const Kokkos_Profiling_SpaceHandle, const char*, const void*,
                      const std::uint64_t bytes) {
    count().now -= static_cast<std::int64_t>(bytes);
  }

  bool m_knows_process = false;
};

}  // namespace LinAttn::perf
