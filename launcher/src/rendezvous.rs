//! The store where the ranks meet. The launcher hosts it, so that it outlives every rank.

use std::net::SocketAddr;

use accelerator_collective::rendezvous::{StoreOptions, StoreServer, Token};

use crate::error::{Error, Result, chain};

/// A running store; it stops when dropped.
#[derive(Debug)]
pub(crate) struct Store {
    server: StoreServer,
}

impl Store {
    /// Starts the store for the `world_size` ranks of `job` on `host` and `port`; port 0 takes
    /// a free one.
    ///
    /// The ranks inherit the launcher's environment, so the store goes by the same variables:
    /// it asks for the token of `ACCEL_TOKEN_FILE`, where that is set, and with
    /// `ACCEL_INSECURE=1` for none.
    ///
    /// # Errors
    /// When the port is taken, `host` is no address of this machine, or the token cannot be
    /// read.
    pub(crate) fn open(host: &str, port: u16, world_size: usize, job: &str) -> Result<Self> {
        let mut options = StoreOptions::new(world_size).with_job(job);
        if let Some(path) = std::env::var_os("ACCEL_TOKEN_FILE") {
            let token = Token::from_file(path).map_err(|error| Error::usage(chain(&error)))?;
            options = options.with_token(token);
        }
        if std::env::var_os("ACCEL_INSECURE").is_some_and(|value| value == "1") {
            options = options.without_security();
        }
        let server = StoreServer::bind_with((host, port), options).map_err(|error| {
            if error.is_address_in_use() {
                Error::system(format!(
                    "port {port} of {host} is taken; leave --master-port out to take a free one, \
                     or end what listens there"
                ))
            } else {
                Error::system(format!("--master-addr {host}: {}", chain(&error)))
            }
        })?;
        Ok(Self { server })
    }

    /// The address it listens on.
    pub(crate) fn address(&self) -> SocketAddr {
        self.server.local_addr()
    }
}
