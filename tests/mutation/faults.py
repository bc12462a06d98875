# SPDX-License-Identifier: BSD-3-Clause
"""Faults for scripts/mutation-check: (name, file, text that stands there once, what it becomes)."""

WALKER = "include/linattn/engine/walker.hpp"
TILE = "include/linattn/tile.hpp"
SCAN = "include/linattn/engine/scan.hpp"
ARGUMENTS = "include/linattn/engine/arguments.hpp"
ROWS = "include/linattn/rows.hpp"
ENGINE = "include/linattn/engine/engine.hpp"
BLOCKS = "include/linattn/local_softmax/walker.hpp"
LOCAL = "include/linattn/local_softmax.hpp"
DECODE = "include/linattn/local_softmax/decode.hpp"
JOINED = "include/linattn/joined.hpp"
STEP = "include/linattn/engine/step.hpp"
MAPS = "include/linattn/feature_map.hpp"
NORMALISER = "include/linattn/normaliser.hpp"

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
    ("no gradient through the denominator", WALKER, "if (!wants_row_terms()) return;\n    load_row_terms(", "return;\n    load_row_terms("),
    ("the last row of a short chunk is skipped", WALKER, "left < m_args.plan.chunk ? left : m_args.plan.chunk", "left < m_args.plan.chunk ? left - (left > 1) : m_args.plan.chunk"),
    ("dV lacks the chunk", WALKER, "target.store = sum.count > 0 ? Store::add : Store::overwrite;", "target.store = Store::overwrite;"),
    ("a head of a group overwrites the others", WALKER, "m_key_target.store = begins ? Store::overwrite : Store::add;", "m_key_target.store = Store::overwrite;"),
    ("the cotangent of z is lost", WALKER, "if (begins) sum.add({{m_tiles.one, 0, 0}, m_tiles.sums, 0, 1});", ""),
    ("the rows of a parameter are not summed", WALKER, "total += m_tiles.parameter_terms[r];\n            *part += total;", "total += m_tiles.parameter_terms[r];\n            *part = total;"),
    ("parameters see the first segment only", SCAN, "for (std::int64_t s = 0; s < segments; ++s)", "for (std::int64_t s = 0; s < 1; ++s)"),
    # borders
    ("queries stand top-left", WALKER, "{ return m_sequence.nk - m_sequence.nq; }", "{ return 0; }"),
    ("keys of a member begin at its queries", ROWS, "k = args.cu_seqlens_k[index];", "k = args.cu_seqlens_q[index];"),
    ("hidden keys are seen", ROWS, "return !nothing && (!mask || mask[key * stride] != 0);", "return !nothing;"),
    ("hidden keys lie in place", ROWS, "{ return !nothing && !mask; }", "{ return !nothing; }"),
    ("offsets have 32 bits", ROWS, "static_cast<S*>(data) + (b * batch_stride + h * head_stride + n * row_stride)", "static_cast<S*>(data) + static_cast<int>(b * batch_stride + h * head_stride + n * row_stride)"),
    ("an empty row is divided by zero", WALKER, "const auto counts = [=](int r) { return !(normalise && row_scale[first + r] == A(0)); };", "const auto counts = [](int) { return true; };"),
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
    # a constant in the weights, norms of rows
    ("b m is missing from the row sums", WALKER, "const A constant = m_constant * static_cast<A>(m_count);", "const A constant = A(0);"),
    ("a constant is added for hidden keys", WALKER, "if (!m_args.has_constant || all_visible(piece)) return;", "return;"),
    ("values are not summed", WALKER, "if (m_args.has_constant) add_rows(m_values, keys.rows, once, value_sums());", ""),
    ("dV lacks what the constant gives it", WALKER, "if (begins && m_args.has_constant) sum.add({{m_tiles.one, 0, 0}, m_tiles.value_sums, 0, 1});", ""),
    ("db lacks the chunk", WALKER, "terms.more = m_tiles.weight_cotangents;", "terms.more = nullptr;"),
    ("norms of rows have no gradient", WALKER, "rate * (df_row[d] - from[d] * along)", "rate * df_row[d]"),
    ("sums of values of segments are not scanned", SCAN, "scan_values(team, states.value_sums + unit", "if (segments < 2) scan_values(team, states.value_sums + unit"),
    ("the largest norm is the last of equals", SCAN, "if (!(norm <= most) && most == most) {  // the first", "if (!(norm < most) && most == most) {  // the first"),
    ("the largest norm has no gradient", SCAN, "if (row < 0) return;", "return;"),
    ("the largest norm is that of hidden keys, too", SCAN, "if (!visible(r)) continue;", ""),
    ("the number of keys counts hidden ones", SCAN, "count += visible(j) ? 1 : 0;\n    }", "count += 1;\n    }"),
    # noise, small row sums, a centre
    ("noise moves with the segment", WALKER, "d.queries + begin + d.first_query;", "d.queries + begin + d.first_query + m_segment;"),
    ("noise does not reach the cotangents", WALKER, "if (noisy && !by_centred) multiply_by_noise(cotangents", "if (false) multiply_by_noise(cotangents"),
    ("windows begin with the noise of the first column", WALKER, "row * dv + m_first_value,", "row * dv,"),
    ("a replaced row sum keeps its gradient", WALKER, "if (m_args.clamp) clear_replaced_row_terms(rows, head, begin, first);", ""),
    ("a replaced row sum has no sign", NORMALISER, "return {s < A(0) ? -least : least, true};", "return {least, true};"),
    ("o does not get its centre back", WALKER, "return [=](int j) { row[j] += share * centre[j]; };", "return [=](int) {};"),
    ("the record keeps the last of equals", NORMALISER, "!(a.ratio >= b.ratio)", "!(a.ratio > b.ratio)"),
    # one token
    ("a step does not bring the old sums to the new shift", STEP, "has_old ? old[j * old_element] * carry : A(0)", "has_old ? old[j * old_element] : A(0)"),
    ("a step answers before its key is in", STEP, "numerators[j] += query * s;", "numerators[j] += query * before;"),
    ("a step does not count its key", STEP, "args.before.count(b) + (visible ? 1 : 0));\n          if", "args.before.count(b));\n          if"),
    ("a step forgets the scale", STEP, "rows.row_scale[g] = args.scale;", "rows.row_scale[g] = A(1);"),
    # a second branch
    ("weights of another tile keep the old maximum", BLOCKS, "const A factor = corrections[r];", "const A factor = A(1);"),
    ("sums of weights keep the old maximum", BLOCKS, "sums[r] *= row.correction;", ""),
    ("a block sees keys after its row", BLOCKS, "return diagonal ? row + 1 : keys.rows;", "return keys.rows;"),
    ("blocks see hidden keys", BLOCKS, "hidden[r] = seen(r) ? A(0) : minus_infinity<A>();", "hidden[r] = A(0);"),
    ("blocks do not begin anew in members", BLOCKS, "return m_sequence.k_begin + tile.begin;", "return tile.begin;"),
    ("queries of a block stand top-left", BLOCKS, "return m_args.causal ? m_sequence.nk - m_sequence.nq : 0;", "return 0;"),
    ("scores lose delta", BLOCKS, "p[j] * (row[j] - delta) * scale", "p[j] * row[j] * scale"),
    ("delta of an earlier tile keeps the old maximum", BLOCKS, "deltas[r] = deltas[r] * corrections[r] +", "deltas[r] = deltas[r] +"),
    ("the linear branch is told the dots of both", BLOCKS, "m_tiles.dots[r] - m_tiles.deltas[r];", "m_tiles.dots[r];"),
    ("a ratio does not complement", BLOCKS, "complement ? 1 - x : x", "x"),
    ("heads of a group share one gradient of a block", BLOCKS, "m_key_target.store = m_value_target.store = begins ?", "m_key_target.store = m_value_target.store = true ?"),
    ("dr of a ratio lacks the block", LOCAL, "sum_parts(d_r, a.r_parts, a.combine == Combine::ratio ? a.p_parts : nullptr);", "sum_parts(d_r, a.r_parts, nullptr);"),
    ("the linear branch takes all of dO", JOINED, "args.output_factors = m_term.combine == Combine::average ? ColumnFactors(0.5) : m_term.r;", "args.output_factors = 1.0;"),
    ("the linear branch overwrites what the blocks wrote", JOINED, "args.joined = true;", "args.joined = false;"),
    # exact attention
    ("log-sum-exps lack their logarithm", BLOCKS, "fused_multiply_add(m, m_args.scale, log(l))", "m * m_args.scale"),
    ("a later tile of keys overwrites dq in place", BLOCKS, "begins && !(adds && m_queries_direct) ? Store::overwrite", "begins ? Store::overwrite"),
    ("a later tile of keys overwrites dq", BLOCKS, "if (adds) return add_to_rows(", "if (false) return add_to_rows("),
    ("the last tile of a causal block is left out", BLOCKS, "static_cast<double>(tiles) * sqrt(", "static_cast<double>(tiles - 1) * sqrt("),
    ("queries without keys keep what is in dq", BLOCKS, "if (keys.rows == 0) return clear_query_gradients();", "if (keys.rows == 0) return;"),
    ("known weights are relative to the sum of the first row", BLOCKS, "fused_multiply_add(row[j] + hidden[j], scale, -logsum)", "fused_multiply_add(row[j] + hidden[j], scale, -logsums[0])"),
    ("a token does not see its own key", DECODE, "return fits(b) ? keys_before(b) + (appends(b) ? 1 : 0) : 0;", "return fits(b) ? keys_before(b) : 0;"),
    ("splits keep their own maximum", DECODE, "factor = exp_nonpositive((factor - reference) * args.scale);", "factor = A(1);"),
    ("a cache does not grow", DECODE, "return args.fits(b) ? args.keys(b) : args.keys_before(b);", "return args.keys_before(b);"),
    ("hidden tokens are kept", DECODE, "if (args.appends(b) && begin <= before && before < end)", "if (begin <= before && before < args.capacity)"),
]
