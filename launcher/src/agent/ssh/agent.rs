//! The other end: the process that a client starts on a host. It is the shim of the launcher there.

use std::ffi::OsStr;
use std::io;
use std::process::ExitCode;

use accelerator_collective::launcher::listen_everywhere;
use accelerator_host::TOKEN_FILE;

use super::order::{AgentHello, MAX_ORDER, Order, greet, receive};
use super::push;
use crate::error::{Error, Result};
use crate::process;
use crate::supervisor::shim::{self, Control};
use crate::supervisor::store::MemoryFile;

/// Says hello on standard output, runs the launcher that the order on standard input describes, and gives its exit
/// code.
///
/// # Errors
/// When the order does not come, or cannot be carried out on this host.
pub(crate) fn run(program: Option<&OsStr>) -> Result<ExitCode> {
    if program == Some(OsStr::new(push::PROGRAM)) {
        // What this program was read from; the ranks do not need it.
        drop(process::inherited(push::PROGRAM_FD));
        let _ = rustix::thread::set_name(c"accel-launch");
    }
    let lost = |error: io::Error| Error::system("the client is gone").with_source(error);
    let no_port = |error| Error::system("no port is free").with_source(error);
    // Kept until the order is there, which takes as long as the slowest host: nobody else may take the port meanwhile.
    let port = listen_everywhere(0).map_err(no_port)?;
    let hello = AgentHello {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        connection: std::env::var("SSH_CONNECTION").ok(),
        port: port.local_addr().map_err(no_port)?.port(),
    };
    greet(&mut io::stdout(), &hello).map_err(lost)?;
    let mut order: Order = receive(&mut io::stdin(), MAX_ORDER).map_err(lost)?;
    drop(port);
    if !order.folder.is_dir() {
        return Err(Error::usage(format!(
            "there is no folder {} on this host: start accel-launch in a folder that all hosts have",
            order.folder.display()
        )));
    }
    let token = MemoryFile::of_token(order.token.as_bytes())?;
    order
        .variables
        .push((TOKEN_FILE.name.into(), token.path().into()));
    let code = shim::run(
        &order.arguments,
        |command| {
            command.envs(order.variables.iter().cloned());
            command.current_dir(&order.folder);
        },
        Control::StandardInput,
    );
    match code {
        // `ssh` keeps 255 for itself.
        Some(code) if code == ExitCode::from(255) => Ok(ExitCode::from(254)),
        Some(code) => Ok(code),
        None => Err(Error::system(
            "this host has no /proc, which a launcher over SSH needs",
        )),
    }
}
