#include "pool.h"

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#include <unistd.h>

namespace fastcar {

namespace {

constexpr int kSpins = 2000;  // tries before a waiting thread yields its core
constexpr std::chrono::microseconds kAwake{500};  // yielding, before a thread that waits for a job sleeps: a step is near
constexpr int kMostThreads = 512;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int default_size() {
    if (const char* given = std::getenv("FASTCAR_THREADS"); given && *given) {
        char* end = nullptr;
        const long value = std::strtol(given, &end, 10);
        if (*end || value < 1 || value > kMostThreads)
            throw std::runtime_error(std::string("FASTCAR_THREADS must be a whole number in 1..512, got ") + given);
        return static_cast<int>(value);
    }
#if defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    const unsigned count = std::thread::hardware_concurrency();
    return count ? static_cast<int>(count) : 1;
}

// Never destroyed: after a fork its threads exist in the parent alone, and cannot be joined.
std::shared_ptr<Pool>* pool = new std::shared_ptr<Pool>;
std::mutex* guard = new std::mutex;

void forget() {
    pool = new std::shared_ptr<Pool>;
    guard = new std::mutex;
}

}  // namespace

std::shared_ptr<Pool> Pool::get() {
    std::lock_guard<std::mutex> lock(*guard);
    if (!*pool) {
#if defined(__linux__)
        static const int registered = pthread_atfork(nullptr, nullptr, forget);
        (void)registered;
#endif
        *pool = std::make_shared<Pool>(default_size());
    }
    return *pool;
}

void Pool::resize(int threads) {
    if (threads < 0 || threads > kMostThreads) throw std::invalid_argument("threads must lie in 0..512");
    get();
    auto fresh = std::make_shared<Pool>(threads ? threads : default_size());
    std::lock_guard<std::mutex> lock(*guard);
    pool->swap(fresh);  // whoever runs on the old one finishes there
}

Pool::Pool(int threads) : size_(threads), process_(getpid()) {
    std::lock_guard<std::mutex> lock(mutex_);  // new threads wait until the size is settled
    try {
        for (int n = 1; n < threads; ++n) threads_.emplace_back(&Pool::work, this, n);
    } catch (const std::system_error&) {
        size_ = static_cast<int>(threads_.size()) + 1;  // the system gives no more: work with those
    }
}

Pool::~Pool() {
    if (process_ != getpid()) {
        new std::vector<std::thread>(std::move(threads_));  // a fork left them behind; there is nothing to join
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::run(const Job& job) {
    std::lock_guard<std::mutex> turn(turn_);
    if (size_ == 1) return job(0);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = &job;
        round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job(0);
    barrier();  // nobody still holds the job
}

void Pool::work(int thread) {
    unsigned seen = 0;
    for (;;) {
        const auto idle = std::chrono::steady_clock::now();
        for (int tries = 0; round_.load(std::memory_order_acquire) == seen; ++tries) {
            if (tries < kSpins) {
                relax();
            } else {
                std::this_thread::yield();
                if (tries % 16 == 0 && std::chrono::steady_clock::now() - idle > kAwake) break;
            }
        }
        const Job* job;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return round_.load(std::memory_order_relaxed) != seen; });
            if (stop_) return;
            seen = round_.load(std::memory_order_relaxed);
            job = job_;
        }
        (*job)(thread);
        barrier();
    }
}

void Pool::wait_at_barrier() {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int tries = 0; phase_.load(std::memory_order_acquire) == phase;) {
        ++tries < kSpins ? relax() : std::this_thread::yield();
    }
}

}  // namespace fastcar
