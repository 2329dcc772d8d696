#pragma once

#include <openssl/ssl.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// Makes calls on `socket` return instead of blocking. Throws std::system_error.
void stop_blocking(int socket);

// The settings that the TLS connections of one side share: TLS 1.3 and nothing
// older, with a key that both sides know beforehand (RFC 8446, section 2.2,
// "PSK with (EC)DHE key establishment") and no certificates. A side that does
// not know the secret cannot end the handshake, in either direction, and a
// secret that becomes known later does not reveal what was recorded before.
//
// An attacker with the record of one handshake may try secrets at leisure, so a
// secret must be random and not a word (job_secret.h).
class TlsSettings {
 public:
  enum class Side { server, client };

  // Throws std::runtime_error if OpenSSL refuses.
  TlsSettings(Side side, const std::string& secret);
  TlsSettings(const TlsSettings&) = delete;
  TlsSettings& operator=(const TlsSettings&) = delete;

  // Returns the start of a connection over `socket`, which stays the caller's.
  SSL* connect(int socket) const;

 private:
  struct ContextDeleter {
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };
  Side side_;
  std::array<unsigned char, 32> key_{};
  std::unique_ptr<SSL_CTX, ContextDeleter> context_;
};

// One connection of the agents' store over a socket that does not block: by
// TLS, or plain. For one thread. No call blocks, and none raises SIGPIPE.
class StoreChannel {
 public:
  enum class Progress {
    done,
    wants_input,   // call again when the socket is readable
    wants_output,  // call again when the socket is writable
    closed,        // by the other side, or broken
    refused,       // in a handshake: the other side has another secret, or none
  };

  // Plain if `tls` is null; otherwise `*tls` must outlive this object. Makes
  // the socket non-blocking.
  StoreChannel(FileDescriptor socket, const TlsSettings* tls);

  int fd() const { return socket_.get(); }
  // Must be `done` before anything is read or written.
  Progress handshake();
  // Reads up to `most` bytes and appends them to `bytes`.
  Progress read(std::string& bytes, size_t most);
  // Removes from `bytes` what was written; `done`: all was.
  Progress write(std::string& bytes);

 private:
  struct ConnectionDeleter {
    void operator()(SSL* connection) const { SSL_free(connection); }
  };
  Progress progress_after(int result);

  FileDescriptor socket_;
  std::unique_ptr<SSL, ConnectionDeleter> tls_;
  bool ready_;
};

}  // namespace lockstep::internal
