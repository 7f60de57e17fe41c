//! The process that a client starts on a host, which is the shim of the launcher there: the command that starts it, its
//! hello, its order, and its work.
//!
//! ```text
//! agent → client   MAGIC, AgentHello; then the output of its launcher
//! client → agent   Order; then a byte for each signal; the end means: kill everything
//! ```
//!
//! Start-up files of a shell may print before the hello.
//!
//! The program of the agent is one that the host has, or this very one, sent over the same connection. The file that
//! receives it is deleted before the first byte is in it, so that nothing is left whatever is killed. It is run by its
//! descriptor. A folder whose file system runs no programs is passed over: an empty file that can be run is an empty
//! script.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerator_collective::internal::{TargetFeatures, listen_everywhere};
use accelerator_host::TOKEN_FILE;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::agent::line::write_frame;
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
    if program == Some(OsStr::new(PROGRAM)) {
        // The file that this program was read from; the ranks do not need it.
        drop(process::inherited(PROGRAM_FD));
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

/// The length of the largest order: the system allows an environment of a few MiB.
const MAX_ORDER: usize = 64 << 20;

/// The length of the longest hello.
const MAX_HELLO: usize = 64 << 10;

/// The largest output of a start-up file before the hello.
const MAX_NOISE: usize = 1 << 20;

/// The first bytes of the hello.
const MAGIC: &[u8] = b"\0accel-launch agent\0";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AgentHello {
    pub(super) version: String,
    /// `SSH_CONNECTION`: the addresses and ports of the client and of the host.
    pub(super) connection: Option<String>,
    /// A port that is free on its host.
    pub(super) port: u16,
}

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) token: String,
    /// The current folder.
    pub(super) folder: PathBuf,
    /// The command line of the launcher, with the program's name.
    pub(super) arguments: Vec<OsString>,
    /// Variables in addition to those of the host.
    pub(super) variables: Vec<(OsString, OsString)>,
}

impl fmt::Debug for Order {
    /// Omits the token, and the variables, which may hold others.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("Order");
        shown.field("arguments", &self.arguments);
        shown.finish_non_exhaustive()
    }
}

fn greet(output: &mut impl Write, hello: &AgentHello) -> io::Result<()> {
    output.write_all(MAGIC)?;
    send(output, hello)?;
    output.flush()
}

/// Waits for a hello, and skips the bytes before it.
pub(super) fn greeted(input: &mut impl Read) -> io::Result<AgentHello> {
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(MAGIC) {
        input.read_exact(&mut byte)?;
        seen.push(byte[0]);
        if seen.len() > MAX_NOISE {
            return Err(io::Error::other("it prints something else without end"));
        }
    }
    receive(input, MAX_HELLO)
}

pub(super) fn send(output: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    write_frame(output, &serde_json::to_vec(message)?)
}

/// Reads a message of at most `most` bytes.
pub(super) fn receive<M: DeserializeOwned>(input: &mut impl Read, most: usize) -> io::Result<M> {
    let mut header = [0; 4];
    input.read_exact(&mut header)?;
    let length = u32::from_le_bytes(header) as usize;
    if length > most {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut body = vec![0; length];
    input.read_exact(&mut body)?;
    Ok(serde_json::from_slice(&body)?)
}

/// The path by which a program that was sent is run.
pub(super) const PROGRAM: &str = "/proc/self/fd/4";

/// The descriptor of a program that was sent.
const PROGRAM_FD: i32 = 4;

/// The command that receives a program of `length` bytes on its standard input and runs it. It has no character that
/// means something within single quotes to the shells of users.
pub(super) fn command_of_sent(length: usize) -> String {
    format!(
        "exec /bin/sh -c '{}\
         for d in \"${{TMPDIR:-/tmp}}\" /tmp /var/tmp /dev/shm \"$HOME\"; do \
         f=$(mktemp \"$d/accel-launch.XXXXXX\" 2>/dev/null) || continue; \
         if chmod 700 \"$f\" && \"$f\" 2>/dev/null; then exec 3>\"$f\" 4<\"$f\"; rm -f \"$f\"; break; fi; \
         rm -f \"$f\"; f=; done; \
         if [ -z \"$f\" ]; then echo no folder for temporary files lets programs run >&2; exit 126; fi; \
         head -c {length} >&3; exec 3>&-; \
         if [ $(wc -c <&4) -eq {length} ]; then exec {PROGRAM} __agent; fi; exit 1'",
        check_script(
            std::env::consts::ARCH,
            &TargetFeatures::of_this_program().names()
        )
    )
}

/// Returns a script that refuses a host whose processor cannot run this program: by its kind, and by the flags of the
/// features that the program was compiled for. The program itself could only end by a signal there.
fn check_script(machine: &str, features: &[&str]) -> String {
    let mut script = String::new();
    if ["x86_64", "aarch64"].contains(&machine) {
        script = format!(
            "m=$(uname -m); [ \"$m\" = {machine} ] || {{ \
             echo \"{NEEDS} a processor of kind {machine}, and it is of kind $m\" >&2; exit 126; }}; "
        );
    }
    let flags: Vec<String> = features.iter().map(|feature| flag(feature)).collect();
    if machine == "x86_64" && !flags.is_empty() {
        script.push_str(&format!(
            "if [ -r /proc/cpuinfo ]; then l=; for x in {}; do \
             grep -qw \"$x\" /proc/cpuinfo || l=\"$l $x\"; done; \
             [ -z \"$l\" ] || {{ echo \"{NEEDS} a processor with$l\" >&2; exit 126; }}; fi; ",
            flags.join(" ")
        ));
    }
    script
}

/// The first words of the refusal by a host that cannot run the program.
pub(super) const NEEDS: &str = "this accel-launch needs";

/// Returns the name of a processor feature in Linux's `/proc/cpuinfo`.
fn flag(feature: &str) -> String {
    match feature {
        "cmpxchg16b" => "cx16".to_owned(),
        "lzcnt" => "abm".to_owned(),
        "sha" => "sha_ni".to_owned(),
        "sse3" => "pni".to_owned(),
        "avx512bf16" | "avx512bitalg" | "avx512fp16" | "avx512vbmi2" | "avx512vnni"
        | "avx512vpopcntdq" => feature.replace("avx512", "avx512_"),
        _ => feature.replace('.', "_"),
    }
}

/// The command that runs the program at `path`; `None` where its path cannot be written for every shell.
pub(super) fn command_of_present(path: &Path) -> Option<String> {
    let path = path.to_str()?;
    let is_plain = !path.contains(['\'', '\\', '!', '\n']);
    is_plain.then(|| format!("exec '{path}' __agent"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::ffi::OsStringExt;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn what_a_shell_prints_before_the_hello_is_skipped() {
        let hello = AgentHello {
            version: "1".to_owned(),
            connection: None,
            port: 7,
        };
        let mut sent = b"JoinReply to a!\n\0\0accel-launch \xff".to_vec();
        greet(&mut sent, &hello).unwrap();
        sent.extend_from_slice(b"output");
        let mut input = sent.as_slice();
        assert_eq!(greeted(&mut input).unwrap().port, 7);
        assert_eq!(input, b"output");
        assert!(greeted(&mut &b"nothing"[..]).is_err());
        assert!(greeted(&mut io::repeat(b'x')).is_err());
    }

    #[test]
    fn an_order_keeps_bytes_that_are_no_text_and_shows_no_secret() {
        let order = Order {
            token: "secret".to_owned(),
            folder: "/a".into(),
            arguments: vec![OsString::from_vec(b"\xff".to_vec())],
            variables: vec![("A".into(), "secret".into())],
        };
        let mut sent = Vec::new();
        send(&mut sent, &order).unwrap();
        assert!(receive::<Order>(&mut sent.as_slice(), sent.len() - 5).is_err());
        let received: Order = receive(&mut sent.as_slice(), MAX_ORDER).unwrap();
        assert_eq!(received.arguments, order.arguments);
        assert!(!format!("{received:?}").contains("secret"));
    }

    /// Runs the command for a program of `length` bytes, of which `sent` are sent; expects that no file is left.
    fn run_sent(length: usize, sent: &[u8]) -> (Option<i32>, String) {
        let (folder, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(folder.path().join("__agent"), "it runs").unwrap();
        let mut shell = Command::new("/bin/sh")
            .args(["-c", &command_of_sent(length)])
            .env("TMPDIR", temporary.path())
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let _ = shell.stdin.take().unwrap().write_all(sent);
        let ended = shell.wait_with_output().unwrap();
        assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
        let said = String::from_utf8_lossy(&ended.stdout).into_owned();
        (ended.status.code(), said)
    }

    #[test]
    fn what_is_sent_is_run_if_it_is_whole() {
        // `cat` copies the rest of its input where it is not told otherwise: `__agent` is a file there.
        let program = std::fs::read("/bin/cat").unwrap();
        let ended = run_sent(program.len(), &program);
        assert_eq!(ended, (Some(0), "it runs".to_owned()));
        let half = run_sent(1000, b"#!/bin/sh\necho it runs\n");
        assert_eq!(half, (Some(1), String::new()));
    }

    #[test]
    fn a_processor_that_does_not_run_the_program_is_refused_before_it_is_run() {
        let run = |machine, features: &[&str]| {
            let script = check_script(machine, features) + "echo it runs";
            let shell = Command::new("/bin/sh").args(["-c", &script]).output();
            let ended = shell.unwrap();
            let said = [ended.stdout, ended.stderr].concat();
            (
                ended.status.code(),
                String::from_utf8(said).unwrap().trim().to_owned(),
            )
        };
        let (here, other) = match std::env::consts::ARCH {
            "aarch64" => ("aarch64", "x86_64"),
            here => (here, "aarch64"),
        };
        assert_eq!(run(here, &[]), (Some(0), "it runs".to_owned()));
        let (code, said) = run(other, &[]);
        assert_eq!(code, Some(126));
        assert!(
            said.starts_with(&format!(
                "{NEEDS} a processor of kind {other}, and it is of kind "
            )),
            "{said}"
        );
        if here == "x86_64" {
            assert_eq!(
                run(here, &["sse4.2", "no.such", "sse3", "nor-this"]),
                (
                    Some(126),
                    format!("{NEEDS} a processor with no_such nor-this")
                )
            );
        }
    }

    #[test]
    fn commands_can_be_quoted_for_every_shell() {
        let checks = check_script("x86_64", &["avx2"]);
        assert!(!checks.contains(['\'', '\\', '!', '\n']), "{checks}");
        let command = command_of_sent(5);
        let script = command.strip_prefix("exec /bin/sh -c '").unwrap();
        let script = script.strip_suffix('\'').unwrap();
        assert!(!script.contains(['\'', '\\', '!', '\n']), "{script}");
        assert_eq!(
            command_of_present(Path::new("/opt/a b")).as_deref(),
            Some("exec '/opt/a b' __agent")
        );
        assert_eq!(command_of_present(Path::new("/it's")), None);
    }
}
