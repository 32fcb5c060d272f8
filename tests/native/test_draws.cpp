// Random words, bounded draws and choosing k of n, against their published answers and the plainest way to do each.
#include "common/draw.h"
#include "cpu/choose.h"
#include "cpu/choose_lanes.h"
#include "cpu/philox_lanes.h"
#include "native_test.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

using namespace gnnsys;
using native_test::Random;

namespace {

std::array<uint32_t, 4> words_of(const Words& words) { return {words.w[0], words.w[1], words.w[2], words.w[3]}; }

using Four = std::array<uint32_t, 4>;

std::vector<uint32_t> floyd(const Stream& stream, uint32_t n, uint32_t k) {
  std::set<uint32_t> chosen;
  for (uint32_t j = 0; j < k; ++j) {
    const uint32_t last = n - k + j;
    const uint32_t word = stream.words(j / 4, 0).w[j % 4];
    const uint32_t drawn = bounded(stream, j, word, last + 1);
    chosen.insert(chosen.count(drawn) ? last : drawn);
  }
  return {chosen.begin(), chosen.end()};
}

}  // namespace

TEST("philox gives the known answers of Random123") {
  EXPECT(words_of(philox4x32(0, 0, 0, 0, 0)) == (Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT(words_of(philox4x32(ones, ones, ones, ones, ~0ull)) ==
         (Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT(words_of(philox4x32(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0x299f31d0a4093822ull)) ==
         (Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST("philox in lanes is philox, counter by counter") {
  Random random(1);
  for (int round = 0; round < 100; ++round) {
    const uint64_t key = random.next();
    uint32_t counter[kLanes][4];
    u32x4 state[kChains][4];
    for (int l = 0; l < kLanes; ++l) {
      for (int c = 0; c < 4; ++c) {
        counter[l][c] = static_cast<uint32_t>(random.next());
        state[l / 4][c][l % 4] = counter[l][c];
      }
    }
    philox4x32_lanes(state, key);
    for (int l = 0; l < kLanes; ++l) {
      const Words want = philox4x32(counter[l][0], counter[l][1], counter[l][2], counter[l][3], key);
      for (int c = 0; c < 4; ++c) {
        EXPECT(state[l / 4][c][l % 4] == want.w[c]);
      }
    }
  }
}

TEST("bounded draws stay below their bound and hit all of it") {
  const Stream stream{7, 11, 3};
  for (const uint32_t bound : {1u, 2u, 3u, 7u, 100u, 0x80000001u, 0xffffffffu}) {
    std::set<uint32_t> seen;
    for (uint32_t i = 0; i < 4000; ++i) {
      const uint32_t drawn = bounded(stream, i, stream.words(i / 4, 0).w[i % 4], bound);
      EXPECT(drawn < bound);
      seen.insert(drawn);
    }
    EXPECT(bound > 100 || seen.size() == bound);
  }
  for (const uint64_t bound : {1ull, 5ull, 0x8000000000000001ull, ~0ull}) {
    for (uint64_t i = 0; i < 1000; ++i) {
      EXPECT(bounded64(stream, i, bound) < bound);
    }
  }
}

TEST("k of n without replacement is Floyd's subset, ascending, for every k") {
  RankChooser chooser;
  Random random(2);
  for (uint32_t k = 0; k <= 200; k = k < 40 ? k + 1 : k + 37) {
    for (const uint32_t n : {k, k + 1, 2 * k + 3, 100000u, 0xfffffffeu}) {
      const Stream stream{random.next(), random.next(), static_cast<uint32_t>(random.below(kMaxTree))};
      std::vector<uint32_t> words(k), ranks(k);
      make_words(stream, k, words.data());
      chooser.without_replacement(stream, words.data(), n, k, ranks.data());
      EXPECT(ranks == floyd(stream, n, k));
    }
  }
}

TEST("every subset is drawn about equally often") {
  RankChooser chooser;
  std::vector<int> count(1 << 6, 0);
  for (uint64_t node = 0; node < 20000; ++node) {
    const Stream stream{5, node, 0};
    uint32_t words[3], ranks[3];
    make_words(stream, 3, words);
    chooser.without_replacement(stream, words, 6, 3, ranks);
    ++count[(1u << ranks[0]) | (1u << ranks[1]) | (1u << ranks[2])];
  }
  int subsets = 0;
  for (size_t set = 0; set < count.size(); ++set) {  // 20 subsets, 1000 each, deviation 31
    subsets += count[set] > 0;
    EXPECT(count[set] == 0 || std::abs(count[set] - 1000) < 160);
  }
  EXPECT(subsets == 20);
}

TEST("k of n with replacement is k bounded draws, ascending") {
  const RankChooser chooser;
  for (const uint32_t k : {1u, 4u, 33u}) {
    const Stream stream{9, k, 0};
    std::vector<uint32_t> words(k), ranks(k), want(k);
    make_words(stream, k, words.data());
    for (uint32_t j = 0; j < k; ++j) {
      want[j] = bounded(stream, j, words[j], 10);
    }
    std::sort(want.begin(), want.end());
    chooser.with_replacement(stream, words.data(), 10, k, ranks.data());
    EXPECT(ranks == want);
  }
}

TEST("choosing in lanes is choosing one by one, but for lanes that may have rejected a word") {
  RankChooser chooser;
  Random random(4);
  for (uint32_t k = 0; k <= kMostLaneDraws; ++k) {
    for (const bool repeat : {false, true}) {
      uint32_t sizes[kLanes];
      std::vector<Stream> streams;
      std::vector<uint32_t> words(k * kLanes), ranks(k * kLanes);
      for (uint32_t l = 0; l < kLanes; ++l) {
        const uint32_t wide[] = {0x7fffffffu, 0x80000001u, 0xfffffffeu};  // of which some are rejected
        sizes[l] = l < 3 ? wide[l] : k + static_cast<uint32_t>(random.below(l % 2 ? 3 : 5000)) + (repeat ? 1 : 0);
        streams.push_back({random.next(), random.next(), 0});
        for (uint32_t j = 0; j < k; ++j) {
          words[j * kLanes + l] = streams[l].words(j / 4, 0).w[j % 4];
        }
      }
      const uint32_t doubtful = choose_lanes(words.data(), sizes, k, repeat, ranks.data());
      for (uint32_t l = 0; l < kLanes; ++l) {
        std::vector<uint32_t> own(k), found(k), want(k);
        bool may_reject = false;
        for (uint32_t j = 0; j < k; ++j) {
          own[j] = words[j * kLanes + l];
          found[j] = ranks[j * kLanes + l];
          const uint32_t bound = repeat ? sizes[l] : sizes[l] - k + j + 1;
          may_reject |= own[j] * bound < bound;
        }
        EXPECT((doubtful >> l & 1) == may_reject);
        if (repeat) {
          chooser.with_replacement(streams[l], own.data(), sizes[l], k, want.data());
        } else {
          chooser.without_replacement(streams[l], own.data(), sizes[l], k, want.data());
        }
        EXPECT(may_reject || found == want);
      }
    }
  }
}

TEST("the logarithm made of basic operations is the logarithm") {
  Random random(3);
  for (int i = 0; i < 10000; ++i) {
    const double u = open_unit(random.next());
    EXPECT(u > 0 && u < 1);
    EXPECT(std::abs(negative_log(u) + std::log(u)) <= 1e-14 * std::max(1.0, -std::log(u)));
  }
}
