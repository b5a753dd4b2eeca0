// A ForwardBackwardOutput message, written while its parts come: the shapes alone say where all logprobs lie, in any order they come;
// the metrics follow at the end.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "bytes.hpp"

namespace spindle {

class Outline {
  public:
    // Of datums with lengths[d] rows of logprobs; widths[d] 0 = [N], K = [N, K]. Consecutive datums of equal width share one ArrayRecord.
    Outline(std::vector<int64_t> lengths, std::vector<int64_t> widths);

    size_t num_datums() const { return lengths_.size(); }
    size_t size() const { return size_; }  // of the message without metrics
    int64_t cells(size_t datum) const;     // logprobs of a datum

    // Writes size() bytes, all but the logprobs.
    void write(uint8_t* to);
    // Where the logprobs of a datum lie in what write() wrote.
    size_t offset(size_t datum) const { return offsets_[datum]; }

  private:
    template <class Sink>
    void describe(Sink& sink);
    template <class Sink>
    void batched_tensor(Sink& sink, size_t first, size_t last);

    std::vector<int64_t> lengths_, widths_;
    std::vector<size_t> offsets_;
    size_t size_ = 0;
};

using Metrics = std::vector<std::pair<std::string, double>>;

// Writes metrics as they follow an outline; returns how many bytes they are, and only counts them for nullptr.
size_t write_metrics(const Metrics& metrics, uint8_t* to);

}  // namespace spindle
