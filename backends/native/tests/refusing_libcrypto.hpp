// A libcrypto that refuses, as one that is restricted does.
#pragma once

#include <atomic>
#include <deque>

#include "security/libcrypto.hpp"

namespace collectives {

// While it lives, the process's libcrypto makes no keys, and finishes so many records and no more.
class RefusingLibcrypto {
 public:
  explicit RefusingLibcrypto(int records) : instead_(kept(refusing(records))) {}

 private:
  static Libcrypto refusing(int records) {
    left() = records;
    Libcrypto functions = real();
    functions.EVP_PKEY_keygen = [](EvpKeyContext*, EvpKey**) { return 0; };
    functions.EVP_CipherFinal_ex = [](EvpCipherContext* context, unsigned char* out, int* size) {
      return left()-- > 0 ? real().EVP_CipherFinal_ex(context, out, size) : 0;
    };
    return functions;
  }
  static const Libcrypto& real() {
    static const Libcrypto kReal = libcrypto();
    return kReal;
  }
  static std::atomic<int>& left() {
    static std::atomic<int> records{0};
    return records;
  }

  // Threads may still call what they have found when it is put back.
  static const Libcrypto& kept(const Libcrypto& functions) {
    static std::deque<Libcrypto> all;
    return all.emplace_back(functions);
  }

  LibcryptoInstead instead_;
};

}  // namespace collectives
