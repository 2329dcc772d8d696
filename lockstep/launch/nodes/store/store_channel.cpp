#include "lockstep/launch/nodes/store/store_channel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace lockstep::internal {
namespace {

constexpr std::string_view kIdentity = "lockstep agent 1";
// The one cipher suite of both sides: the hash of a key that is agreed
// beforehand is a part of it.
constexpr const char* kCipherSuite = "TLS_AES_128_GCM_SHA256";
constexpr std::array<unsigned char, 2> kCipherSuiteNumber{0x13, 0x01};
// Errors of OpenSSL from this number on are alerts of the other side.
constexpr int kFirstAlert = SSL_AD_REASON_OFFSET;

using Key = std::array<unsigned char, 32>;

void require(bool held, const char* what) {
  if (held) return;
  char text[256] = "";
  ERR_error_string_n(ERR_get_error(), text, sizeof(text));
  throw std::runtime_error(std::string("OpenSSL refuses ") + what + ": " +
                           text);
}

// The key is derived, so that the secret itself is never in TLS's hands.
Key derive_key(const std::string& secret) {
  constexpr std::string_view kPurpose =
      "lockstep run: agents' store, version 1";
  Key key;
  unsigned int length = 0;
  require(HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
               reinterpret_cast<const unsigned char*>(kPurpose.data()),
               kPurpose.size(), key.data(), &length) != nullptr &&
              length == key.size(),
          "the secret");
  return key;
}

// The caller owns the result; nullptr if OpenSSL has no memory.
SSL_SESSION* session_with(SSL* connection, const Key& key) {
  SSL_SESSION* session = SSL_SESSION_new();
  const SSL_CIPHER* cipher =
      SSL_CIPHER_find(connection, kCipherSuiteNumber.data());
  if (session == nullptr || cipher == nullptr ||
      SSL_SESSION_set1_master_key(session, key.data(), key.size()) != 1 ||
      SSL_SESSION_set_cipher(session, cipher) != 1 ||
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1) {
    SSL_SESSION_free(session);
    return nullptr;
  }
  return session;
}

const Key& key_of(SSL* connection) {
  return *static_cast<const Key*>(
      SSL_CTX_get_app_data(SSL_get_SSL_CTX(connection)));
}

int offer_key(SSL* connection, const EVP_MD*, const unsigned char** identity,
              size_t* identity_length, SSL_SESSION** session) {
  *session = session_with(connection, key_of(connection));
  *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *identity_length = kIdentity.size();
  return *session != nullptr ? 1 : 0;
}

int find_key(SSL* connection, const unsigned char* identity, size_t length,
             SSL_SESSION** session) {
  *session = nullptr;
  if (std::string_view(reinterpret_cast<const char*>(identity), length) !=
      kIdentity) {
    return 1;  // without a key, and there is no certificate: no handshake
  }
  *session = session_with(connection, key_of(connection));
  return *session != nullptr ? 1 : 0;
}

// OpenSSL's own socket BIO writes without MSG_NOSIGNAL.
int fd_of(BIO* bio) {
  return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio)));
}

bool may_try_again() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

int write_socket(BIO* bio, const char* bytes, int count) {
  BIO_clear_retry_flags(bio);
  const ssize_t sent =
      send(fd_of(bio), bytes, static_cast<size_t>(count), MSG_NOSIGNAL);
  if (sent < 0 && may_try_again()) BIO_set_retry_write(bio);
  return static_cast<int>(sent);
}

int read_socket(BIO* bio, char* bytes, int count) {
  BIO_clear_retry_flags(bio);
  const ssize_t got = recv(fd_of(bio), bytes, static_cast<size_t>(count), 0);
  if (got < 0 && may_try_again()) BIO_set_retry_read(bio);
  return static_cast<int>(got);
}

long control_socket(BIO*, int command, long, void*) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

BIO_METHOD* socket_method() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made =
        BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket");
    require(made != nullptr, "a BIO");
    BIO_meth_set_write(made, write_socket);
    BIO_meth_set_read(made, read_socket);
    BIO_meth_set_ctrl(made, control_socket);
    return made;
  }();
  return method;
}

}  // namespace

void stop_blocking(int socket) {
  const int flags = fcntl(socket, F_GETFL);
  if (flags < 0 || fcntl(socket, F_SETFL, flags | O_NONBLOCK) != 0) {
    throw_errno("a socket of the agents' store");
  }
}

TlsSettings::TlsSettings(Side side, const std::string& secret)
    : side_(side),
      key_(derive_key(secret)),
      context_(SSL_CTX_new(side == Side::server ? TLS_server_method()
                                                : TLS_client_method())) {
  SSL_CTX* context = context_.get();
  require(context != nullptr, "a context of TLS");
  require(SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
              SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) == 1 &&
              SSL_CTX_set_ciphersuites(context, kCipherSuite) == 1 &&
              SSL_CTX_set_num_tickets(context, 0) == 1,
          "TLS 1.3");
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE |
                                SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_app_data(context, &key_);
  if (side == Side::server) {
    SSL_CTX_set_psk_find_session_callback(context, find_key);
  } else {
    SSL_CTX_set_psk_use_session_callback(context, offer_key);
    // No certificate is trusted, so a server that shows one instead of the key
    // is refused.
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  }
}

SSL* TlsSettings::connect(int socket) const {
  SSL* connection = SSL_new(context_.get());
  BIO* bio = BIO_new(socket_method());
  if (connection == nullptr || bio == nullptr) {
    SSL_free(connection);
    BIO_free(bio);
    require(false, "a connection");
  }
  BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(socket)));
  BIO_set_init(bio, 1);
  SSL_set_bio(connection, bio, bio);
  if (side_ == Side::server) {
    SSL_set_accept_state(connection);
  } else {
    SSL_set_connect_state(connection);
  }
  return connection;
}

StoreChannel::StoreChannel(FileDescriptor socket, const TlsSettings* tls)
    : socket_(std::move(socket)),
      tls_(tls != nullptr ? tls->connect(socket_.get()) : nullptr),
      ready_(tls == nullptr) {
  stop_blocking(socket_.get());
  // Messages are small, and must not wait for each other. A Unix socket does
  // not know this option.
  const int on = 1;
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

StoreChannel::Progress StoreChannel::progress_after(int result) {
  switch (SSL_get_error(tls_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return Progress::wants_input;
    case SSL_ERROR_WANT_WRITE:
      return Progress::wants_output;
    case SSL_ERROR_SSL:
      return !ready_ && ERR_GET_REASON(ERR_peek_error()) >= kFirstAlert
                 ? Progress::refused
                 : Progress::closed;
    default:
      return Progress::closed;
  }
}

StoreChannel::Progress StoreChannel::handshake() {
  if (ready_) return Progress::done;
  ERR_clear_error();
  const int result = SSL_do_handshake(tls_.get());
  if (result != 1) return progress_after(result);
  // The key that was agreed beforehand counts as a session that is taken up
  // again. Without it nobody has proved anything.
  if (SSL_session_reused(tls_.get()) != 1) return Progress::refused;
  ready_ = true;
  return Progress::done;
}

StoreChannel::Progress StoreChannel::read(std::string& bytes, size_t most) {
  const size_t before = bytes.size();
  bytes.resize(before + most);
  Progress progress = Progress::done;
  size_t count = 0;
  if (tls_) {
    ERR_clear_error();
    const int result =
        SSL_read_ex(tls_.get(), bytes.data() + before, most, &count);
    if (result != 1) progress = progress_after(result);
  } else {
    const ssize_t got = recv(fd(), bytes.data() + before, most, 0);
    if (got > 0) {
      count = static_cast<size_t>(got);
    } else {
      progress =
          got < 0 && may_try_again() ? Progress::wants_input : Progress::closed;
    }
  }
  bytes.resize(before + count);
  return progress;
}

StoreChannel::Progress StoreChannel::write(std::string& bytes) {
  while (!bytes.empty()) {
    size_t count = 0;
    if (tls_) {
      ERR_clear_error();
      const int result =
          SSL_write_ex(tls_.get(), bytes.data(), bytes.size(), &count);
      if (result != 1) return progress_after(result);
    } else {
      const ssize_t sent = send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0) {
        return may_try_again() ? Progress::wants_output : Progress::closed;
      }
      count = static_cast<size_t>(sent);
    }
    bytes.erase(0, count);
  }
  return Progress::done;
}

}  // namespace lockstep::internal
