# SPDX-License-Identifier: BSD-3-Clause
"""Faults for scripts/mutation-check: (name, file, text that stands there once, what it becomes)."""

WALKER = "include/linattn/engine/walker.hpp"
TILE = "include/linattn/tile.hpp"
SCAN = "include/linattn/engine/scan.hpp"
ARGUMENTS = "include/linattn/engine/arguments.hpp"
ENGINE = "include/linattn/engine/engine.hpp"
STEP = "include/linattn/engine/step.hpp"
MAPS = "include/linattn/feature_map.hpp"

FAULTS = [
    # tiles
    ("a tile starts one column early", TILE, "const T* b = p.b + j0;", "const T* b = p.b + (j0 > 0 ? j0 - 1 : 0);"),
    ("an upper band begins below the diagonal", TILE, "begin = i0 + Rows - 1;", "begin = i0 + Rows;"),
    ("a lower band ends above the diagonal", TILE, "end = i0 + 1 < p.inner ? i0 + 1 : p.inner;", "end = i0 < p.inner ? i0 : p.inner;"),
    ("a transposed target is stored where it lay", TILE, "T* const c = t.c + j0 * ldc + i0;", "T* const c = t.c + i0 * ldc + j0;"),
    ("the triangle loses its diagonal", TILE, "const int end = i >= first ? i + 1 : 0;\n      const T term", "const int end = i >= first ? i : 0;\n      const T term"),
    ("a compensated sum forgets what it lost", TILE, "low = (t - high) - y;", "low = V{};"),
    # sums
    ("the denominator lacks the chunk", WALKER, "sums.more = m_tiles.weights;", "sums.more = nullptr;"),
    ("no gradient through the denominator", WALKER, "if (!wants_row_terms()) return;", "return;"),
    ("the last row of a short chunk is skipped", WALKER, "left < m_args.plan.chunk ? left : m_args.plan.chunk", "left < m_args.plan.chunk ? left - (left > 1) : m_args.plan.chunk"),
    ("dV lacks the chunk", WALKER, "target.store = with_chunk ? Store::add : Store::overwrite;", "target.store = Store::overwrite;"),
    ("a head of a group overwrites the others", WALKER, "m_key_target.store = begins ? Store::overwrite : Store::add;", "m_key_target.store = Store::overwrite;"),
    ("the cotangent of z is lost", WALKER, "if (begins) sum.add({{m_tiles.one, 0, 0}, m_tiles.sums, 0, 1});", ""),
    ("the rows of a parameter are not summed", WALKER, "*part += total;", "*part = total;"),
    ("parameters see the first segment only", SCAN, "for (std::int64_t s = 0; s < segments; ++s)", "for (std::int64_t s = 0; s < 1; ++s)"),
    # borders
    ("queries stand top-left", WALKER, "{ return m_sequence.nk - m_sequence.nq; }", "{ return 0; }"),
    ("keys of a member begin at its queries", ARGUMENTS, "k = args.cu_seqlens_k[index];", "k = args.cu_seqlens_q[index];"),
    ("hidden keys are seen", ARGUMENTS, "return !nothing && (!mask || mask[key * stride] != 0);", "return !nothing;"),
    ("hidden keys lie in place", ARGUMENTS, "{ return !nothing && !mask; }", "{ return !nothing; }"),
    ("offsets have 32 bits", ARGUMENTS, "static_cast<S*>(data) + (b * batch_stride + h * head_stride + n * row_stride)", "static_cast<S*>(data) + static_cast<int>(b * batch_stride + h * head_stride + n * row_stride)"),
    ("an empty row is divided by zero", WALKER, "[=](int r) { return !(normalise && row_scale[first + r] == A(0)); });\n  }", "[](int) { return true; });\n  }"),
    # segments, windows, states
    ("a suffix is taken for a prefix", SCAN, "return kind == ScanKind::suffix ? segments - 1 - i : i;", "return i;"),
    ("windows overlap", WALKER, "m_first_value = w.first_value(tile);", "m_first_value = w.first_value(tile) - (w.of_values ? tile : 0);"),
    ("a window of features reads the first", WALKER, "m_first_feature = w.first_feature(tile);", "m_first_feature = 0;"),
    ("the state of the caller is left out", WALKER, "if (m_args.initial.present) enter_caller_state(m_args.initial);", ""),
    ("the final state lacks the last chunk", WALKER, "if (!ends || state_is_wanted) absorb_loaded_keys(piece);", "if (!ends) absorb_loaded_keys(piece);"),
    # exponents
    ("a state is rescaled the wrong way", WALKER, "const A factor = power_of_two<A>(Sign * (old[d] - now[d]));\n              return", "const A factor = power_of_two<A>(Sign * (now[d] - old[d]));\n              return"),
    ("a row takes the shift of the first of its chunk", WALKER, "running + (first + r) * ld_shift : shift;\n          const A* x = q.data + r * q.row;\n          int largest", "running + first * ld_shift : shift;\n          const A* x = q.data + r * q.row;\n          int largest"),
    ("chunks are not cut where a shift rises", WALKER, "return rise > largest_rise;", "return false;"),
    ("the exponential drops its low part", MAPS, "const T f = fused_multiply_add(x, low, fused_multiply_add(x, high, -n));\n    return exp2_fraction(f) * power_of_two<T>(static_cast<int>(n) - shift);", "const T f = fused_multiply_add(x, high, -n);\n    return exp2_fraction(f) * power_of_two<T>(static_cast<int>(n) - shift);"),
    ("a large denominator loses its second factor", WALKER, "{ return x * first * second; }", "{ return x * first; }"),
    # one token
    ("a step does not bring the old sums to the new shift", STEP, "has_old ? old[j * old_element] * carry : A(0)", "has_old ? old[j * old_element] : A(0)"),
    ("a step answers before its key is in", STEP, "numerators[j] += query * s;", "numerators[j] += query * before;"),
    ("a step forgets the scale", STEP, "rows.row_scale[g] = args.scale;", "rows.row_scale[g] = A(1);"),
]
