// The one inner loop of all matrix products: a few rows against a few panels of columns, with every sum in a register.

#pragma once

#include <cstddef>

#include "vectors.h"

namespace {

// Panels that are worth multiplying at once with so many rows: enough sums under way to hide an addition's latency.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }

// sums[row][panel] += x[row] · panel, over `inputs` inputs. A panel has PANEL weights per input, `w_stride` apart.
// Meanwhile one line of memory per input and panel is fetched: from prefetch[panel], prefetch_step bytes apart.
template <int ROWS, int PANELS, typename Weight>
INLINE void multiply(const float* x, ptrdiff_t x_stride, const Weight* const (&w)[PANELS], ptrdiff_t w_stride,
                     int inputs, const char* const (&prefetch)[PANELS], ptrdiff_t prefetch_step, Vec (&sums)[ROWS][PANELS][2]) {
    Vec s[ROWS][PANELS][2];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) s[r][p][0] = sums[r][p][0], s[r][p][1] = sums[r][p][1];
    for (int k = 0; k < inputs; k++) {
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
            if (prefetch_step) __builtin_prefetch(prefetch[p] + k * prefetch_step, 0, 2);
        // What there is less of, inputs or weights, waits in registers for the other.
        if constexpr (ROWS <= 2 * PANELS) {
            Vec own[ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) own[r] = broadcast(x[r * x_stride + k]);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; p++) {
                Vec first, second;
                load_panel_row(w[p] + k * w_stride, first, second);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) s[r][p][0] += own[r] * first;
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) s[r][p][1] += own[r] * second;
            }
        } else {
            Vec weights[PANELS][2];
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; p++) load_panel_row(w[p] + k * w_stride, weights[p][0], weights[p][1]);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const Vec own = broadcast(x[r * x_stride + k]);
#pragma GCC unroll 8
                for (int p = 0; p < PANELS; p++) s[r][p][0] += own * weights[p][0], s[r][p][1] += own * weights[p][1];
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) sums[r][p][0] = s[r][p][0], sums[r][p][1] = s[r][p][1];
}

// Calls body<rows>(), with a number of rows that the compiler knows: 1 … MAX_ROWS.
template <int ROWS = MAX_ROWS, typename Body>
INLINE void with_rows(int rows, const Body& body) {
    if (rows == ROWS) return body.template operator()<ROWS>();
    if constexpr (ROWS > 1) with_rows<ROWS - 1>(rows, body);
}

}  // namespace
