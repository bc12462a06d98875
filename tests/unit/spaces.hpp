// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <linattn/linattn.hpp>
#include <linattn/variants.hpp>
#include <string>
#include <type_traits>

/// \file spaces.hpp
/// The lists over which tests are typed: execution space, scalar, variant.

namespace LinAttn::test_support {

template <class... T>
struct TypeList {};

template <class... Lists>
struct Concatenated;
template <class... A>
struct Concatenated<TypeList<A...>> {
  using type = TypeList<A...>;
};
template <class... A, class... B, class... Rest>
struct Concatenated<TypeList<A...>, TypeList<B...>, Rest...>
    : Concatenated<TypeList<A..., B...>, Rest...> {};

#if defined(KOKKOS_ENABLE_SERIAL)
using SerialSpaces = TypeList<Kokkos::Serial>;
#else
using SerialSpaces = TypeList<>;
#endif
#if defined(KOKKOS_ENABLE_OPENMP)
using OpenMpSpaces = TypeList<Kokkos::OpenMP>;
#else
using OpenMpSpaces = TypeList<>;
#endif
#if defined(KOKKOS_ENABLE_CUDA)
using CudaSpaces = TypeList<Kokkos::Cuda>;
#else
using CudaSpaces = TypeList<>;
#endif

#if defined(LINATTN_TEST_FEW)  // see tests/mutation
using Spaces = SerialSpaces;
using TestVariants = VariantList<Identity, Elu, Lln, Affine>;
using AllTestVariants = VariantList<Identity, Elu, Lln, Affine, Softmax>;
#else
using Spaces = Concatenated<SerialSpaces, OpenMpSpaces, CudaSpaces>::type;
using TestVariants = LinearVariants;
template <class... V>
VariantList<V..., Softmax> with_softmax(VariantList<V...>);
using AllTestVariants = decltype(with_softmax(TestVariants{}));
#endif

/// What a typed test is about; T and V are void where a test needs none.
template <class ExecSpace_, class T_ = void, class V_ = void>
struct Config {
  using ExecSpace = ExecSpace_;
  using T = T_;
  using V = V_;
};

namespace detail {

template <class E, class... T>
TypeList<Config<E, T>...> scalars_of(TypeList<T...>);
template <class... E>
auto scalars(TypeList<E...>) ->
    typename Concatenated<TypeList<>, decltype(scalars_of<E>(TypeList<float, double>{}))...>::type;

template <class E, class T, class... V>
TypeList<Config<E, T, V>...> variants_of(Config<E, T>, VariantList<V...>);
template <class List, class... C>
auto variants(TypeList<C...>) ->
    typename Concatenated<TypeList<>, decltype(variants_of(C{}, List{}))...>::type;

template <class... E>
TypeList<Config<E>...> alone(TypeList<E...>);

template <class T, class... E>
TypeList<Config<E, T>...> with_scalar(TypeList<E...>);

template <class... C>
::testing::Types<C...> as_google(TypeList<C...>);

}  // namespace detail

/// Execution spaces; with float and double; with every shipped variant that has states; that in double only. OverAll
/// has exact attention, too.
using OverSpaces = decltype(detail::as_google(detail::alone(Spaces{})));
using OverScalars = decltype(detail::as_google(detail::scalars(Spaces{})));
template <class List>
using Over = decltype(detail::as_google(detail::variants<List>(detail::scalars(Spaces{}))));
template <class List>
using OverInDouble = decltype(detail::as_google(detail::variants<List>(detail::with_scalar<double>(Spaces{}))));
using OverVariants = Over<TestVariants>;
using OverVariantsInDouble = OverInDouble<TestVariants>;
using OverAllVariants = Over<AllTestVariants>;
using OverAllVariantsInDouble = OverInDouble<AllTestVariants>;

/// Names of typed tests: "OpenMP_float_lln".
struct ConfigName {
  template <class C>
  static std::string GetName(int) {
    std::string name = C::ExecSpace::name();
    if constexpr (std::is_same_v<typename C::T, float>) name += "_float";
    if constexpr (std::is_same_v<typename C::T, double>) name += "_double";
    if constexpr (!std::is_void_v<typename C::V>) name += std::string("_") + C::V::name;
    return name;
  }
};

}  // namespace LinAttn::test_support
