// Collectives over memory that peers write into, each in one launch: the sum over ranks with residual and RMS norm, and
// the largest logit. The specification is plait_kernels.collective.reference.
//
// A rank pushes its vectors into each peer's memory and finds theirs in its own. The data are their own flags: memory
// that nobody has written holds EMPTY, so a reader waits until a word differs, and empties what it has read. Two slots
// alternate, by a count of launches that the kernels keep themselves, so that a captured launch needs nothing of the
// host. A peer writes to a slot again two launches later: it has then read what this rank pushed in the launch between,
// which began after all blocks of this one had emptied the slot.
//
// Every launch has the same shape on all ranks, and its blocks are resident all at once, since they wait for the peers'.
//
// Large matrices may come in parts by copy engines instead, while a GEMM has the multiprocessors. A flag for each part
// then tells that it has come. Two slots alternate, by the host's count of reductions: a rank copies for reduction n after
// all its sums of n - 1, which needed what every peer copied after all its sums of n - 2.

#ifndef VECTORS
#define VECTORS 1
#endif

#include "block_sum.cuh"
#include "pdl.cuh"
#include "peer_vectors.cuh"

typedef long long Long;

constexpr int SLOTS = 2;
constexpr int MAX_PARTS = 3;  // of a reduction by copies
constexpr int MAX_BLOCKS = 512;

// In device memory, one for each rank; the host writes it once.
struct State {
    unsigned rank, world;
    unsigned long long capacity;        // vectors of one rank in a slot
    unsigned long long spin_nanoseconds;
    unsigned* report;                   // on the host: is lost, rank, peer, launch, place
    // Of each rank: [SLOTS][world - 1][capacity]; with copies then the flags, [SLOTS][MAX_PARTS][world - 1].
    uint4* memory[MAX_RANKS];
    unsigned num_launches[MAX_BLOCKS];  // before this one; each block reads its own, so that none waits for another
    unsigned has_lost_peer;  // as the report, which is too far away for thousands of threads that wait
};

// How long a thread waits for a peer. One that does not write within the limit is reported, and nothing is waited for
// from then on: the host ends the process.
class Timeout {
   public:
    __device__ Timeout(State& state, unsigned source, unsigned launch, unsigned place)
        : state_(state), source_(source), launch_(launch), place_(place), limit_(now() + state.spin_nanoseconds) {}

    __device__ bool is_over() {
        if (++spins_ % SPINS_BETWEEN_LOOKS) return false;
        if (*static_cast<volatile unsigned*>(&state_.has_lost_peer)) return true;
        if (now() < limit_) return false;
        report();
        return true;
    }

   private:
    __device__ void report() {
        volatile unsigned* report = state_.report;
        report[1] = state_.rank, report[2] = source_, report[3] = launch_, report[4] = place_;
        __threadfence_system();
        report[0] = 1;
        state_.has_lost_peer = 1;
    }

    State& state_;
    const unsigned source_, launch_, place_;
    const unsigned long long limit_;
    unsigned spins_ = 0;
};

// Waits until a peer has written a vector, and empties its place.
__device__ uint4 take(uint4* address, State& state, unsigned source, unsigned launch, unsigned place) {
    uint4 vector = peek(address);
    if (!is_there(vector)) {
        Timeout timeout(state, source, launch, place);
        while (!is_there(vector = peek(address)) && !timeout.is_over()) {
        }
    }
    *address = {EMPTY, EMPTY, EMPTY, EMPTY};
    return vector;
}

// One launch's side of the exchange.
class Exchange {
   public:
    // Before the wait for the kernel before this one: only what no kernel writes.
    __device__ Exchange(State* state, unsigned place)
        : rank(state->rank), world(state->world), state_(state), place_(place), capacity_(state->capacity) {
        for (unsigned peer = 0; peer < MAX_RANKS; peer += 4)
            asm volatile("prefetch.global.L1 [%0];" ::"l"(&state->memory[peer]));
    }

    // After that wait, by every thread.
    __device__ void begin() { launch_ = *static_cast<volatile unsigned*>(&state_->num_launches[blockIdx.x]); }

    __device__ void push_to_all(Long at, uint4 own) const {
        for (unsigned peer = 0; peer < world; ++peer)
            if (peer != rank) push(place_of(peer, rank) + at, own);
    }

    __device__ uint4 take_from(unsigned source, Long at) const {
        return take(place_of(rank, source) + at, *state_, source, launch_, place_);
    }

    // Counts the launch for its blocks, and for those that it lacks; behind a barrier that follows `begin`.
    __device__ void end() const {
        const Long stride = static_cast<Long>(gridDim.x) * blockDim.x;
        for (Long i = blockIdx.x + static_cast<Long>(gridDim.x) * threadIdx.x; i < MAX_BLOCKS; i += stride)
            state_->num_launches[i] = launch_ + 1;
    }

    const unsigned rank, world;

   private:
    // Where `source`'s vectors lie in the memory of `owner`.
    __device__ uint4* place_of(unsigned owner, unsigned source) const {
        const unsigned region = source < owner ? source : source - 1;
        return state_->memory[owner] + (launch_ % SLOTS * (world - 1ull) + region) * capacity_;
    }

    State* const state_;
    const unsigned place_;
    const unsigned long long capacity_;
    unsigned launch_;
};

// Which rows copy engines have brought, and how their flag tells.
struct Part {
    unsigned reduction, number, flag;  // `flag` is what comes behind the part's vectors
    Long first_vector;                 // of the reduction's
};

// The same where the host has let copy engines push.
class Copied {
   public:
    __device__ Copied(State* state, unsigned place, const Part& part)
        : rank(state->rank), world(state->world), state_(state), place_(place), part_(part) {}

    __device__ void begin() const {
        const unsigned source = threadIdx.x;
        if (source < world && source != rank) {
            const unsigned* const flag = flag_of(source);
            Timeout timeout(*state_, source, part_.reduction, place_);
            while (acquire(flag) != part_.flag && !timeout.is_over()) {
            }
        }
        __syncthreads();
    }

    __device__ void push_to_all(Long, uint4) const {}

    __device__ uint4 take_from(unsigned source, Long at) const {
        uint4 vector;
        const Long region = slot() * (world - 1ll) + peer(source);
        const uint4* const address = state_->memory[rank] + region * state_->capacity + part_.first_vector + at;
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                     : "l"(address));
        return vector;
    }

    __device__ void end() const {}

    const unsigned rank, world;

   private:
    __device__ static unsigned acquire(const unsigned* address) {
        unsigned word;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
        return word;
    }

    __device__ unsigned slot() const { return part_.reduction % SLOTS; }

    __device__ unsigned peer(unsigned source) const { return source < rank ? source : source - 1; }

    __device__ const unsigned* flag_of(unsigned source) const {
        const uint4* const behind = state_->memory[rank] + SLOTS * (world - 1ull) * state_->capacity;
        return reinterpret_cast<const unsigned*>(behind) + (slot() * MAX_PARTS + part_.number) * (world - 1) +
               peer(source);
    }

    State* const state_;
    const unsigned place_;
    const Part part_;
};

struct Arguments {
    const uint4 *x, *residual, *weight;
    uint4 *normed, *sum;
    Long num_rows, row_vectors;
    float eps;
};

// A thread's vectors of one row.
struct Vectors {
    uint4 of[VECTORS];
};

// One block at a time has a row; a thread has VECTORS vectors of 8 elements of it.
template <typename Source>
class Reduction {
   public:
    __device__ Reduction(const Arguments& given, const Source& exchange) : given_(given), exchange_(exchange) {
        weight_ = load(given_.weight, 0);
    }

    __device__ void run() {
        Vectors own = load(given_.x, blockIdx.x), residual = load(given_.residual, blockIdx.x);
        exchange_.begin();  // comes while those do
        push_row(blockIdx.x, own);
        for (Long row = blockIdx.x; row < given_.num_rows; row += gridDim.x) {
            const Long next = row + gridDim.x;
            Vectors next_own, next_residual;
            if (next < given_.num_rows) {
                next_own = load(given_.x, next), next_residual = load(given_.residual, next);
                push_row(next, next_own);
            }
            sum_row(row, own, residual);
            own = next_own, residual = next_residual;
        }
        exchange_.end();
    }

   private:
    __device__ bool has(int i) const { return column(i) < given_.row_vectors; }

    __device__ Long column(int i) const { return threadIdx.x + static_cast<Long>(i) * blockDim.x; }

    __device__ Long at(Long row, int i) const { return row * given_.row_vectors + column(i); }

    __device__ Vectors load(const uint4* matrix, Long row) const {
        Vectors vectors;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (has(i)) vectors.of[i] = matrix[at(row, i)];
        return vectors;
    }

    __device__ void push_row(Long row, const Vectors& own) const {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (has(i)) exchange_.push_to_all(at(row, i), filled(own.of[i]));
    }

    __device__ void sum_row(Long row, const Vectors& own, const Vectors& residual) const {
        float squares = 0;
        uint4 total[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (!has(i)) continue;
            float sum[8] = {};
            for (unsigned source = 0; source < exchange_.world; ++source)  // in rank order: equal bits on every rank
                add(sum, source == exchange_.rank ? filled(own.of[i]) : exchange_.take_from(source, at(row, i)));
            add(sum, residual.of[i]);
            total[i] = rounded(sum);
            given_.sum[at(row, i)] = total[i];
            squares += squares_of(total[i]);
        }
        const float scale = rsqrtf(block_sum(squares) / (8 * given_.row_vectors) + given_.eps);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (has(i)) given_.normed[at(row, i)] = scaled(total[i], scale, weight_.of[i]);
    }

    __device__ static float squares_of(uint4 vector) {
        const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
        float squares = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) squares += low(words[i]) * low(words[i]) + high(words[i]) * high(words[i]);
        return squares;
    }

    __device__ static uint4 scaled(uint4 total, float scale, uint4 weight) {
        const unsigned words[4] = {total.x, total.y, total.z, total.w};
        const unsigned by[4] = {weight.x, weight.y, weight.z, weight.w};
        unsigned made[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            made[i] = pack(low(words[i]) * scale * low(by[i]), high(words[i]) * scale * high(by[i]));
        return {made[0], made[1], made[2], made[3]};
    }

    const Arguments given_;
    Source exchange_;
    Vectors weight_;
};

extern "C" __global__ void __launch_bounds__(1024, 1)
    all_reduce_add_rms_norm(const uint4* x, const uint4* residual, const uint4* weight, uint4* normed, uint4* sum,
                            Long num_rows, Long row_vectors, double eps, Long place, State* state) {
    let_the_next_kernel_begin();
    Reduction<Exchange> reduction({x, residual, weight, normed, sum, num_rows, row_vectors, static_cast<float>(eps)},
                                  Exchange(state, static_cast<unsigned>(place)));
    wait_for_the_kernel_before();
    reduction.run();
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    add_copied_rms_norm(const uint4* x, const uint4* residual, const uint4* weight, uint4* normed, uint4* sum,
                        Long num_rows, Long row_vectors, double eps, Long place, State* state, Long reduction_number,
                        Long part, Long first_row, Long flag) {
    let_the_next_kernel_begin();
    const Part copied = {static_cast<unsigned>(reduction_number), static_cast<unsigned>(part),
                         static_cast<unsigned>(flag), first_row * row_vectors};
    Reduction<Copied> reduction({x, residual, weight, normed, sum, num_rows, row_vectors, static_cast<float>(eps)},
                                Copied(state, static_cast<unsigned>(place), copied));
    wait_for_the_kernel_before();
    reduction.run();
}

// Orders as the logits do, and equal logits by their ids, the lowest last. No half of it is EMPTY: the lower is positive,
// and the upper of a negative 16-bit logit ends in ones.
__device__ Long order_key(float logit, Long id) {
    int bits = __float_as_int(logit + 0.0f);  // -0 equals 0
    bits ^= bits >> 31 & 0x7fffffff;
    return static_cast<Long>(bits) << 32 | (0x7fffffff - id);
}

// Above the key of any logit: a rank's logits hold NaN or infinity. No half of it is EMPTY.
constexpr Long FAILED_KEY = static_cast<Long>(0x7fffff00) << 32;
constexpr Long NO_TOKEN = -1;

// The ids of the largest logits over the ranks. A rank gives, for each row, the id of the largest of its own `num_own`
// logits, which begin with token `first`, or NO_TOKEN; so is the result of a rank's. One block; a thread has a row at a
// time.
extern "C" __global__ void __launch_bounds__(1024, 1)
    largest_logit(const unsigned short* logits, Long row_stride, const Long* own_ids, Long* ids, Long num_rows,
                  Long first, Long num_own, Long place, State* state) {
    let_the_next_kernel_begin();
    Exchange exchange(state, static_cast<unsigned>(place));
    wait_for_the_kernel_before();
    exchange.begin();
    for (Long row = threadIdx.x; row < num_rows; row += blockDim.x) {
        Long largest = 0x8000000000000000;
        if (num_own) {
            const Long own = own_ids[row];
            largest = FAILED_KEY;
            if (own != NO_TOKEN) largest = order_key(low(logits[row * row_stride + own]), own + first);
        }
        const unsigned lower = static_cast<unsigned>(largest), upper = static_cast<unsigned>(largest >> 32);
        exchange.push_to_all(row, {lower, upper, 0, 0});
        for (unsigned source = 0; source < exchange.world; ++source) {
            if (source == exchange.rank) continue;
            const uint4 theirs = exchange.take_from(source, row);
            largest = max(largest, static_cast<Long>(static_cast<unsigned long long>(theirs.y) << 32 | theirs.x));
        }
        ids[row] = largest == FAILED_KEY ? NO_TOKEN : 0x7fffffff - (largest & 0x7fffffff);
    }
    __syncthreads();
    exchange.end();
}
