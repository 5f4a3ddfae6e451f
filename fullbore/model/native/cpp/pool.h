// Loops shared by the threads of a stage.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Threads that share the items of one loop after another. Each begins with a share of its own, so that it reads memory
// in one go, and then helps the others. The caller waits for items, not for threads: one that the system does not let
// run takes no items, and holds up nobody. Between loops threads spin for some microseconds.
class Pool {
   public:
    explicit Pool(int num_threads) : num_threads_(num_threads), shares_(new Share[num_threads]) {
        for (int i = 1; i < num_threads; i++) workers_.emplace_back([this, i] { work(i); });
    }
    ~Pool() {
        stops_ = true;
        round_.fetch_add(1);
        round_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    int num_threads() const { return num_threads_; }

    void run(void (*body)(const void*, int, int), const void* context, int num_items, int grain) {
        body_ = body, context_ = context;
        grain_.store(grain, std::memory_order_relaxed);
        unfinished_.store(num_items, std::memory_order_relaxed);
        for (int i = 0, begin = 0; i < num_threads_; i++) {
            const int end = int(int64_t(num_items) * (i + 1) / num_threads_);
            shares_[i].end = end;
            shares_[i].untaken.store(end - begin, std::memory_order_release);
            begin = end;
        }
        round_.fetch_add(1, std::memory_order_release);
        round_.notify_all();
        take_items(0);
        for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; spins++) {
            if (spins < SPINS)
                pause();
            else
                std::this_thread::yield();
        }
    }

   private:
    static constexpr int SPINS = 4000;

    struct alignas(64) Share {
        std::atomic<int> untaken{0};
        int end = 0;
    };

    // The loop's other members may be read only by who has taken items of it: until those are finished it goes on.
    void take_items(int own) {
        for (int i = 0; i < num_threads_; i++) {
            Share& share = shares_[(own + i) % num_threads_];
            for (;;) {
                const int grain = grain_.load(std::memory_order_relaxed);  // of the loop before, perhaps: no harm
                const int left = share.untaken.fetch_sub(grain, std::memory_order_acq_rel);
                if (left <= 0) break;
                const int begin = share.end - left, end = std::min(begin + grain, share.end);
                body_(context_, begin, end);
                unfinished_.fetch_sub(end - begin, std::memory_order_release);
            }
        }
    }
    void work(int own) {
        for (uint32_t seen = 0;;) {
            for (int spins = 0; round_.load(std::memory_order_acquire) == seen; spins++) {
                if (spins < SPINS)
                    pause();
                else
                    round_.wait(seen, std::memory_order_acquire);
            }
            seen = round_.load(std::memory_order_acquire);
            if (stops_) return;
            take_items(own);
        }
    }

    const int num_threads_;
    std::unique_ptr<Share[]> shares_;
    std::vector<std::thread> workers_;
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> unfinished_{0};
    alignas(64) std::atomic<int> grain_{1};
    std::atomic<bool> stops_{false};
    void (*body_)(const void*, int, int) = nullptr;
    const void* context_ = nullptr;
};

std::unique_ptr<Pool> pool;
std::mutex pool_mutex;  // one loop at a time; a second caller computes alone

// body(begin, end) over 0 … num_items-1.
template <typename Body>
void parallel(int num_items, int grain, const Body& body) {
    if (pool && num_items > grain && pool_mutex.try_lock()) {
        std::lock_guard lock(pool_mutex, std::adopt_lock);
        pool->run([](const void* context, int begin, int end) { (*static_cast<const Body*>(context))(begin, end); },
                  &body, num_items, grain);
    } else {
        body(0, num_items);
    }
}

int num_threads() { return pool ? pool->num_threads() : 1; }

}  // namespace
