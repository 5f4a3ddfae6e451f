// Linear layers on packed weights: [panels][inputs][PANEL], so that a panel is read from memory in one go, once.

#pragma once

#include <algorithm>
#include <cstddef>

#include "pool.h"
#include "vectors.h"

namespace {

enum Epilogue { STORE = 0, ADD = 1, GATE = 2 };

// sums[row][panel] += x[row] · panel, ROWS rows and PANELS panels at once, over `inputs` inputs.
template <int ROWS, int PANELS, typename Weight>
INLINE void multiply(const float* x, ptrdiff_t x_stride, const Weight* w, ptrdiff_t panel_stride, int inputs,
                     const char* prefetch, ptrdiff_t prefetch_step, Vec (&sums)[ROWS][PANELS][2]) {
    Vec s[ROWS][PANELS][2];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) s[r][p][0] = sums[r][p][0], s[r][p][1] = sums[r][p][1];
    for (int k = 0; k < inputs; k++) {
        Vec weights[PANELS][2];
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) {
            load_panel_row(w + p * panel_stride + ptrdiff_t(k) * PANEL, weights[p][0], weights[p][1]);
            if (prefetch) __builtin_prefetch(prefetch + p * panel_stride * sizeof(Weight), 0, 2);
        }
        prefetch += prefetch_step;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const Vec input = broadcast(x[r * x_stride + k]);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; p++) {
                s[r][p][0] += input * weights[p][0];
                s[r][p][1] += input * weights[p][1];
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) sums[r][p][0] = s[r][p][0], sums[r][p][1] = s[r][p][1];
}

template <typename Weight>
struct Linear {
    const float* x;
    ptrdiff_t x_stride;
    const Weight* w;  // [panels][inputs][PANEL]
    const float* bias;  // [panels * PANEL] or null
    float* y;
    ptrdiff_t y_stride;
    int inputs, outputs;  // outputs: columns of y
    Epilogue epilogue;

    ptrdiff_t panel_stride() const { return ptrdiff_t(inputs) * PANEL; }

    void finish(int row, int panel, Vec first, Vec second) const {
        if (bias) first += load(bias + panel * PANEL), second += load(bias + panel * PANEL + LANES);
        const int width = epilogue == GATE ? LANES : PANEL;
        if (epilogue == GATE) first = first / (1.0f + exp(-first)) * second;
        float* to = y + row * y_stride + ptrdiff_t(panel) * width;
        const int valid = std::min(outputs - panel * width, width);
        if (valid == width) {
            if (epilogue == ADD) first += load(to), second += load(to + LANES);
            store(to, first);
            if (epilogue != GATE) store(to + LANES, second);
            return;
        }
        float values[PANEL];
        store(values, first), store(values + LANES, second);
        for (int i = 0; i < valid; i++) to[i] = epilogue == ADD ? to[i] + values[i] : values[i];
    }

    // While a panel is multiplied the next one is fetched: tile `t` of `tiles` fetches its share of it.
    template <int ROWS, int PANELS>
    void tile(int row, int panel, int t, int tiles) const {
        const ptrdiff_t panel_bytes = panel_stride() * sizeof(Weight), row_bytes = PANEL * sizeof(Weight);
        const char* next = reinterpret_cast<const char*>(w) + (panel + PANELS) * panel_bytes + t * panel_bytes / tiles;
        Vec sums[ROWS][PANELS][2] = {};
        multiply<ROWS, PANELS>(x + row * x_stride, x_stride, w + panel * panel_stride(), panel_stride(), inputs, next,
                               row_bytes / tiles, sums);
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) finish(row + r, panel + p, sums[r][p][0], sums[r][p][1]);
    }

    // Panels `panel` … `end-1`. Few rows: several panels at once, so that enough sums are under way.
    template <int ROWS>
    void panels(int row, int panel, int end, int t, int tiles) const {
        constexpr int PANELS = ROWS == 1 ? 4 : ROWS == 2 ? 3 : ROWS == 3 ? 2 : 1;
        for (; panel + PANELS <= end; panel += PANELS) tile<ROWS, PANELS>(row, panel, t, tiles);
        for (; panel < end; panel++) tile<ROWS, 1>(row, panel, t, tiles);
    }

    template <int ROWS = MAX_ROWS>
    void dispatch(int rows, int row, int panel, int end, int t, int tiles) const {
        if (rows == ROWS) return panels<ROWS>(row, panel, end, t, tiles);
        if constexpr (ROWS > 1) dispatch<ROWS - 1>(rows, row, panel, end, t, tiles);
    }

    // Rows whose inputs stay in the second-level cache, against some panels, each read once from memory.
    void block(int row, int rows, int begin, int end) const {
        const int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
        if (tiles == 1) return dispatch(rows, row, begin, end, 0, 1);
        for (int panel = begin; panel < end; panel++)
            for (int t = 0, done = 0; t < tiles; t++) {
                const int count = (rows - done + tiles - t - 1) / (tiles - t);
                dispatch(count, row + done, panel, panel + 1, t, tiles);
                done += count;
            }
    }

    void run(int rows) const {
        const int width = epilogue == GATE ? LANES : PANEL;
        const int panels = (outputs + width - 1) / width;
        const int most_rows = std::max(MAX_ROWS, int(256 * 1024 / (sizeof(float) * inputs)) / MAX_ROWS * MAX_ROWS);
        const int shares = 6 * num_threads();
        const int grain = num_threads() == 1 ? panels : ((panels + shares - 1) / shares + 3) / 4 * 4;
        for (int row = 0; row < rows; row += most_rows)
            parallel(panels, grain, [&](int begin, int end) { block(row, std::min(most_rows, rows - row), begin, end); });
    }
};

}  // namespace
