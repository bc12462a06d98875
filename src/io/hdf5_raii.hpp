// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <hdf5.h>

#include <mutex>
#include <string>
#include <string_view>
#include <utility>

/// \file hdf5_raii.hpp
/// The only place that owns HDF5 identifiers, its lock and its error stack. Private to the library.

namespace LinAttn::io::hdf5 {

/// The text on one line: runs of control characters become one space.
inline std::string one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f)
      line += c;
    else if (!line.empty() && line.back() != ' ')
      line += ' ';
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

/// Holds HDF5 for one thread and keeps it from printing; restores the caller's error handler.
class Session {
 public:
  Session() : m_lock(mutex()) {
    H5open();
    unsigned is_v2 = 1;
    H5Eauto_is_v2(H5E_DEFAULT, &is_v2);
    m_is_v2 = is_v2 != 0;
    if (m_is_v2) {
      H5Eget_auto2(H5E_DEFAULT, &m_handler.v2, &m_data);
      H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
    } else {
#ifndef H5_NO_DEPRECATED_SYMBOLS
      H5Eget_auto1(&m_handler.v1, &m_data);
      H5Eset_auto1(nullptr, nullptr);
#endif
    }
  }

  ~Session() {
    H5Eclear2(H5E_DEFAULT);
    if (m_is_v2) {
      H5Eset_auto2(H5E_DEFAULT, m_handler.v2, m_data);
    } else {
#ifndef H5_NO_DEPRECATED_SYMBOLS
      H5Eset_auto1(m_handler.v1, m_data);
#endif
    }
  }

  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

 private:
  static std::recursive_mutex& mutex() {
    static std::recursive_mutex the_mutex;
    return the_mutex;
  }

  std::lock_guard<std::recursive_mutex> m_lock;
  bool m_is_v2 = true;
  union {
    H5E_auto2_t v2;
#ifndef H5_NO_DEPRECATED_SYMBOLS
    H5E_auto1_t v1;
#endif
  } m_handler{};
  void* m_data = nullptr;
};

/// HDF5's own reason for the last failure: the innermost entry of its error stack, which is
/// cleared.
inline std::string take_error() {
  std::string reason;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned, const H5E_error2_t* entry, void* data) -> herr_t {
        auto& text = *static_cast<std::string*>(data);
        if (text.empty() && entry->desc != nullptr) text = entry->desc;
        return 0;
      },
      &reason);
  H5Eclear2(H5E_DEFAULT);
  return reason.empty() ? "no reason given by HDF5" : one_line(reason);
}

/// Frees what HDF5 allocated for the variable-length parts of values that it read.
inline void reclaim(hid_t type, hid_t space, void* values) {
#if H5_VERSION_GE(1, 12, 0)
  H5Treclaim(type, space, H5P_DEFAULT, values);
#else
  H5Dvlen_reclaim(type, space, H5P_DEFAULT, values);
#endif
}

/// Owns one identifier. An invalid one (negative) is false.
class Handle {
 public:
  using Close = herr_t (*)(hid_t);

  Handle() = default;
  Handle(hid_t id, Close close) : m_id(id), m_close(close) {}
  Handle(Handle&& other) noexcept : m_id(std::exchange(other.m_id, -1)), m_close(other.m_close) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      close();
      m_id = std::exchange(other.m_id, -1);
      m_close = other.m_close;
    }
    return *this;
  }
  ~Handle() { close(); }

  explicit operator bool() const noexcept { return m_id >= 0; }
  hid_t get() const noexcept { return m_id; }

  /// \returns whether HDF5 closed it without an error.
  bool close() noexcept { return m_id < 0 || m_close(std::exchange(m_id, -1)) >= 0; }

 private:
  hid_t m_id = -1;
  Close m_close = nullptr;
};

}  // namespace LinAttn::io::hdf5
