// The two ways a body can be wrong. bindings.cpp turns them into spindle.errors.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace spindle {

// Not a readable request at all: bad zstd, bad protobuf, over a byte limit.
struct MalformedBody : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A readable request that says something impossible. model_id and seq_id are what the body named.
struct InvalidRequest : std::runtime_error {
    using std::runtime_error::runtime_error;
    std::string model_id;
    bool has_model_id = false;
    int32_t seq_id = 0;
};

inline void append(std::string& out, std::string_view piece) { out.append(piece); }
inline void append(std::string& out, const char* piece) { out.append(piece); }
template <class Number>
inline std::enable_if_t<std::is_arithmetic_v<Number>> append(std::string& out, Number piece) {
    out.append(std::to_string(piece));
}

// text("datum ", 3, ": ...") -> one string; only built when an error is raised.
template <class... Pieces>
std::string text(const Pieces&... pieces) {
    std::string out;
    (append(out, pieces), ...);
    return out;
}

}  // namespace spindle
