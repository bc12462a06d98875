// SPDX-License-Identifier: BSD-3-Clause
#include "output_driver.hpp"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>

#if __has_include(<H5FDdevelop.h>)
#include <H5FDdevelop.h>
#endif

namespace LinAttn::io {

OutputStream::~OutputStream() {
  if (m_descriptor >= 0) ::close(m_descriptor);
}

void OutputStream::write(const void* bytes, std::size_t count, std::uint64_t at) noexcept {
  const auto* next = static_cast<const char*>(bytes);
  while (count > 0 && m_error == 0) {
    const ssize_t written = ::pwrite(m_descriptor, next, std::min<std::size_t>(count, 1u << 30),
                                     static_cast<off_t>(at));
    if (written < 0) {
      if (errno != EINTR) m_error = errno;
      continue;
    }
    if (written == 0) m_error = ENOSPC;
    next += written;
    at += static_cast<std::uint64_t>(written);
    count -= static_cast<std::size_t>(written);
  }
}

bool OutputStream::read(void* bytes, std::size_t count, std::uint64_t at) const noexcept {
  auto* next = static_cast<char*>(bytes);
  while (count > 0) {
    const ssize_t got =
        ::pread(m_descriptor, next, std::min<std::size_t>(count, 1u << 30), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return false;
    if (got == 0) {
      std::memset(next, 0, count);
      return true;
    }
    next += got;
    at += static_cast<std::uint64_t>(got);
    count -= static_cast<std::size_t>(got);
  }
  return true;
}

void OutputStream::truncate(std::uint64_t size) noexcept {
  while (m_error == 0 && ::ftruncate(m_descriptor, static_cast<off_t>(size)) != 0)
    if (errno != EINTR) m_error = errno;
}

void OutputStream::finish() noexcept {
  if (m_descriptor < 0) return;
  // EINVAL and its like: a file system that has nothing to synchronise.
  if (m_error == 0 && ::fsync(m_descriptor) != 0 && errno != EINVAL && errno != ENOSYS &&
      errno != EOPNOTSUPP)
    m_error = errno;
  if (::close(m_descriptor) != 0 && errno != EINTR && m_error == 0) m_error = errno;
  m_descriptor = -1;
}

namespace {

struct StreamPointer {
  OutputStream* stream;
};

struct OutputFile {
  H5FD_t base;  // HDF5 sees only this
  OutputStream* stream;
  haddr_t allocated_end;
  haddr_t written_end;
};

OutputFile& self(H5FD_t* file) { return *reinterpret_cast<OutputFile*>(file); }
const OutputFile& self(const H5FD_t* file) { return *reinterpret_cast<const OutputFile*>(file); }

H5FD_t* open_file(const char*, unsigned, hid_t access, haddr_t) {
  const auto* info = static_cast<const StreamPointer*>(H5Pget_driver_info(access));
  if (info == nullptr) return nullptr;
  auto* file = new (std::nothrow) OutputFile{};
  if (file == nullptr) return nullptr;
  file->stream = info->stream;
  return &file->base;
}

herr_t close_file(H5FD_t* file) {
  delete &self(file);
  return 0;
}

herr_t query(const H5FD_t*, unsigned long* flags) {
  if (flags != nullptr)
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
             H5FD_FEAT_AGGREGATE_SMALLDATA;
  return 0;
}

haddr_t get_eoa(const H5FD_t* file, H5FD_mem_t) { return self(file).allocated_end; }

herr_t set_eoa(H5FD_t* file, H5FD_mem_t, haddr_t end) {
  self(file).allocated_end = end;
  return 0;
}

haddr_t get_eof(const H5FD_t* file, H5FD_mem_t) { return self(file).written_end; }

herr_t read(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t at, std::size_t size, void* buffer) {
  return self(file).stream->read(buffer, size, at) ? 0 : -1;
}

herr_t write(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t at, std::size_t size, const void* buffer) {
  self(file).stream->write(buffer, size, at);
  self(file).written_end = std::max(self(file).written_end, at + size);
  return 0;
}

herr_t truncate(H5FD_t* file, hid_t, hbool_t) {
  OutputFile& output = self(file);
  if (output.written_end != output.allocated_end) {
    output.stream->truncate(output.allocated_end);
    output.written_end = output.allocated_end;
  }
  return 0;
}

herr_t lock(H5FD_t*, hbool_t) { return 0; }  // nobody else knows the temporary name
herr_t unlock(H5FD_t*) { return 0; }

}  // namespace

OutputAccess output_access(OutputStream& stream) {
  H5FD_class_t driver{};
#ifdef H5FD_CLASS_VERSION
  driver.version = H5FD_CLASS_VERSION;
  driver.value = static_cast<H5FD_class_value_t>(511);  // the range HDF5 leaves to private use
#endif
  driver.name = "linattn_output";
  driver.maxaddr = static_cast<haddr_t>(std::numeric_limits<off_t>::max());
  driver.fc_degree = H5F_CLOSE_WEAK;
  driver.fapl_size = sizeof(StreamPointer);
  driver.open = open_file;
  driver.close = close_file;
  driver.query = query;
  driver.get_eoa = get_eoa;
  driver.set_eoa = set_eoa;
  driver.get_eof = get_eof;
  driver.read = read;
  driver.write = write;
  driver.truncate = truncate;
  driver.lock = lock;
  driver.unlock = unlock;
  constexpr H5FD_mem_t free_lists[H5FD_MEM_NTYPES] = H5FD_FLMAP_DICHOTOMY;
  std::copy(std::begin(free_lists), std::end(free_lists), driver.fl_map);

  OutputAccess access{{H5FDregister(&driver), H5FDunregister},
                      {H5Pcreate(H5P_FILE_ACCESS), H5Pclose}};
  const StreamPointer info{&stream};
  if (!access.driver || !access.list ||
      H5Pset_driver(access.list.get(), access.driver.get(), &info) < 0)
    access.list.close();
  return access;
}

}  // namespace LinAttn::io
