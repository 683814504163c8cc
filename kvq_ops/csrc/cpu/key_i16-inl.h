// Products of keys and queries over int16 lanes: for instruction sets that have nothing better. Included inside the
// alphabet's namespace, after its int16 products.

constexpr int kQueryLimit = 32767;
using KeyCode = I16;
using KeyQuery = I16;
using KeySum = I32;

inline KeySum zero_key_sum() {
  return zero_i32();
}
inline KeyCode load_key_signed(const uint8_t* p) {
  return load_signed(p);
}
inline KeyCode load_key_unsigned(const uint8_t* p) {
  return load_unsigned(p);
}
inline KeyCode key_low_nibbles(KeyCode bytes) {
  return low_nibbles(bytes);
}
inline KeyCode key_high_nibbles(KeyCode bytes) {
  return high_nibbles(bytes);
}
inline KeyQuery load_query(const int16_t* p) {
  return load_i16(p);
}
inline void pin_key(KeySum& x) {
  pin(x);
}
// sum += the products of kLanes codes with kLanes query codes, spread over the lanes in any way
inline KeySum dot_key(KeySum sum, KeyCode code, KeyQuery query) {
  return dot(sum, code, query);
}
inline void sum4_keys(KeySum a, KeySum b, KeySum c, KeySum d, int32_t out[4]) {
  sum4(a, b, c, d, out);
}
// Brings query codes in lane order to what load_query reads.
inline void arrange_query(int16_t*, int64_t) {}
