// SPDX-License-Identifier: BSD-3-Clause
#include <exception>
#include <iostream>
#include <linattn/io/io.hpp>

// Copies q of one file to another, by way of a View of any layout and memory space.
void copy_queries(const char* in, const char* out) {
  namespace io = LinAttn::io;
  const io::TensorFile file = io::TensorFile::read(in);  // checks everything above
  const LinAttn::Problem& p = file.problem();
  const Kokkos::View<double****> q("q", p.batch, p.heads, p.nq, p.d);
  io::copy_into(file.q(), q);
  io::Writer writer(out);
  writer.copy_attributes(in, "/");
  writer.write("/inputs/q", io::to_array(q));
  writer.commit();  // without it nothing appears
}

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard guard(argc, argv);
  if (argc != 3) {
    std::cerr << "usage: copy_queries IN.h5 OUT.h5\n";
    return 2;
  }
  try {
    copy_queries(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
