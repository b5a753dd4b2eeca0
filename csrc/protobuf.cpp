#include "protobuf.hpp"

namespace spindle {

bool is_utf8(Bytes text) {
    const uint8_t* at = text.data;
    const uint8_t* const end = at + text.size;
    while (at != end) {
        const uint8_t lead = *at++;
        if (lead < 0x80) continue;
        const int more = lead >= 0xc2 && lead < 0xe0 ? 1 : (lead & 0xf0) == 0xe0 ? 2 : lead >= 0xf0 && lead < 0xf5 ? 3 : 0;
        if (more == 0 || end - at < more) return false;
        // The second byte carries the bounds that keep out overlong forms, surrogates and what is past U+10FFFF.
        const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
        const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
        if (*at < low || *at > high) return false;
        for (int i = 1; i < more; ++i)
            if ((at[i] & 0xc0) != 0x80) return false;
        at += more;
    }
    return true;
}

}  // namespace spindle
