//! The other end: the process that a client starts on a host. It is the shim of the launcher there.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::process::ExitCode;

use accelerator_env::TOKEN_FILE;
use rustix::fs::{MemfdFlags, Mode, fchmod, memfd_create};

use super::order::{AgentHello, Order, greet, receive};
use super::push;
use crate::error::{Error, Result};
use crate::process;
use crate::supervisor::shim::{self, Control};

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
    let hello = AgentHello {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        connection: std::env::var("SSH_CONNECTION").ok(),
        port: free_port().map_err(|error| Error::system("no port is free").with_source(error))?,
    };
    greet(&mut io::stdout(), &hello).map_err(lost)?;
    let mut order: Order = receive(&mut io::stdin()).map_err(lost)?;
    if !order.folder.is_dir() {
        return Err(Error::usage(format!(
            "there is no folder {} on this host: start accel-launch in a folder that all hosts have",
            order.folder.display()
        )));
    }
    let (_kept, token) = in_memory(&order.token)
        .map_err(|error| Error::system("the token cannot be kept").with_source(error))?;
    order.variables.push((TOKEN_FILE.name.into(), token));
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

/// A file that only this user can read, and that is gone with this process; and its path.
fn in_memory(text: &str) -> io::Result<(File, OsString)> {
    let file = memfd_create("accel-token", MemfdFlags::CLOEXEC)?;
    fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    let mut file = File::from(file);
    file.write_all(text.as_bytes())?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((file, path.into()))
}

/// A port that nobody listens on.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("0.0.0.0", 0))?.local_addr()?.port())
}
