//! TLS by certificate: the configuration, and the layer around a session's bytes.
//!
//! The layer is rustls without I/O: cipher text in, plain text to the protocol; the protocol's
//! bytes in, cipher text out. It keeps at most one option or request header of plain text that the
//! protocol has not consumed, and accepts no input while the protocol wants none.

use std::fmt;
use std::io::{Read, Write};
use std::sync::Arc;

use forebay_block::{Completion, Outbox, SLICE};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::session::Protocol;

/// Whether clients may or must use TLS.
#[derive(Clone, Debug, Default)]
pub enum Tls {
    /// TLS is refused.
    #[default]
    Off,
    /// The client decides. An attacker on the wire can decide for it: prefer `Required`.
    Allowed(TlsConfig),
    /// Without TLS, only `STARTTLS` is accepted.
    Required(TlsConfig),
}

/// Certificates, ready for use.
#[derive(Clone)]
pub struct TlsConfig {
    server: Arc<ServerConfig>,
}

impl fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsConfig")
    }
}

/// Why certificates are unusable.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is not valid PEM.
    #[error("the {what} is not valid PEM: {source}")]
    Pem {
        /// Name of the file.
        what: &'static str,
        /// The parser's error.
        source: pem::Error,
    },
    /// A file contains no certificate.
    #[error("there is no certificate in the {what}")]
    NoCertificate {
        /// Name of the file.
        what: &'static str,
    },
    /// The certificate or the key is unusable, or they do not match.
    #[error("the certificate and its key cannot be used: {0}")]
    Unusable(#[from] rustls::Error),
    /// A certificate of the authority is not usable as a trust anchor.
    #[error("the client authority's certificate cannot be used: {0}")]
    Authority(rustls::Error),
    /// The authority's certificates are not usable for a verifier.
    #[error("the client authority's certificates cannot be used: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
}

impl TlsConfig {
    /// A configuration from the contents of PEM files: the server's certificate chain, its private
    /// key, and, if clients must authenticate, the certificates of the authority that signs theirs.
    ///
    /// # Errors
    /// When one of them is malformed or unusable.
    pub fn from_pem(cert: &[u8], key: &[u8], client_ca: Option<&[u8]>) -> Result<Self, TlsError> {
        let chain = certificates(cert, "certificate file")?;
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|source| TlsError::Pem { what: "key file", source })?;
        let provider = Arc::new(default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(ca) => {
                let mut roots = RootCertStore::empty();
                for cert in certificates(ca, "client authority file")? {
                    roots.add(cert).map_err(TlsError::Authority)?;
                }
                let roots = Arc::new(roots);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
                builder.with_client_cert_verifier(verifier.build()?)
            }
        };
        Ok(Self { server: Arc::new(builder.with_single_cert(chain, key)?) })
    }
}

fn certificates(pem: &[u8], what: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.map_err(|source| TlsError::Pem { what, source })?;
    if all.is_empty() { Err(TlsError::NoCertificate { what }) } else { Ok(all) }
}

fn names(certificate: &[u8]) -> Vec<String> {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return Vec::new() };
    let common = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let mut all: Vec<String> = common.map(str::to_owned).collect();
    if let Ok(Some(alternative)) = certificate.subject_alternative_name() {
        for name in &alternative.value.general_names {
            if let GeneralName::DNSName(name) | GeneralName::RFC822Name(name) = name
                && !all.iter().any(|known| known == name)
            {
                all.push((*name).to_owned());
            }
        }
    }
    all
}

/// TLS around a protocol.
pub(crate) struct TlsLayer {
    connection: ServerConnection,
    /// Plain text from the client that the protocol has not consumed yet.
    received: Vec<u8>,
    /// Output of the protocol in plain text; empty between calls.
    inner: Outbox,
}

impl TlsLayer {
    pub fn new(tls: &Tls) -> Result<Self, rustls::Error> {
        let (Tls::Allowed(config) | Tls::Required(config)) = tls else {
            return Err(rustls::Error::General("TLS is off".into()));
        };
        let mut connection = ServerConnection::new(Arc::clone(&config.server))?;
        // Requests in flight bound the output of the protocol.
        connection.set_buffer_limit(None);
        Ok(Self { connection, received: Vec::new(), inner: Outbox::default() })
    }

    /// The names in the client's certificate, which is valid: its common names, and the DNS names
    /// and addresses of mail among its alternative names.
    pub fn peer_names(&self) -> Vec<String> {
        let chain = self.connection.peer_certificates().unwrap_or_default();
        chain.first().map_or_else(Vec::new, |own| names(own))
    }

    pub fn receive(&mut self, protocol: &mut Protocol, bytes: &[u8], out: &mut Outbox) -> usize {
        let mut rest = bytes;
        loop {
            self.feed(protocol);
            if self.inner.close {
                rest = &[];
            }
            if rest.is_empty() || !protocol.wants_input() {
                break;
            }
            if let Err(error) = self.decrypt(&mut rest) {
                self.inner.why = Some(format!("TLS failed: {error}"));
                protocol.die(&mut self.inner);
            }
        }
        self.flush(out);
        bytes.len() - rest.len()
    }

    pub fn complete(&mut self, protocol: &mut Protocol, done: Completion, out: &mut Outbox) {
        protocol.complete(done, &mut self.inner);
        self.feed(protocol);
        self.flush(out);
    }

    pub fn speak(&mut self, protocol: &mut Protocol, out: &mut Outbox) {
        if out.bytes.len() < SLICE {
            protocol.speak(&mut self.inner);
            self.feed(protocol);
            self.flush(out);
        }
    }

    /// Continues with plain text that the protocol could not consume before.
    pub fn go_on(&mut self, protocol: &mut Protocol, out: &mut Outbox) {
        if !self.received.is_empty() && protocol.wants_input() {
            self.feed(protocol);
            self.flush(out);
        }
    }

    pub fn shutdown(&mut self, protocol: &mut Protocol, out: &mut Outbox) {
        protocol.shutdown(&mut self.inner);
        self.flush(out);
    }

    /// Decrypts some cipher text and stores its plain text. Bytes after the client's closure alert
    /// are ignored (RFC 8446, section 6.1).
    fn decrypt(&mut self, bytes: &mut &[u8]) -> Result<(), rustls::Error> {
        let general = |error: std::io::Error| rustls::Error::General(error.to_string());
        if self.connection.read_tls(bytes).map_err(general)? == 0 {
            *bytes = &[];
        }
        let state = self.connection.process_new_packets()?;
        let before = self.received.len();
        self.received.resize(before + state.plaintext_bytes_to_read(), 0);
        self.connection.reader().read_exact(&mut self.received[before..]).map_err(general)
    }

    /// Passes the stored plain text to the protocol.
    fn feed(&mut self, protocol: &mut Protocol) {
        if protocol.wants_input() && !self.received.is_empty() {
            let used = protocol.receive(&self.received, &mut self.inner);
            self.received.drain(..used);
        }
    }

    /// Encrypts the protocol's output.
    fn flush(&mut self, out: &mut Outbox) {
        out.ios.append(&mut self.inner.ios);
        // Writing to memory: neither call can fail.
        let _ = self.connection.writer().write_all(&self.inner.bytes);
        self.inner.bytes.clear();
        if std::mem::take(&mut self.inner.close) {
            self.connection.send_close_notify();
            out.close = true;
            out.why = self.inner.why.take();
        }
        while self.connection.wants_write() {
            if self.connection.write_tls(&mut out.bytes).is_err() {
                break;
            }
        }
    }
}
