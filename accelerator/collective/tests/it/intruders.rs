//! Strangers that try to join a job.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::Duration,
};

use accelerator_collective::internal::{Rendezvous, StoreHost, StoreServer, Token};
use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp, Result, Topology};

const DEADLINE: Duration = Duration::from_secs(60);

fn launch(rank: usize, port: u16, token: Option<&Token>) -> Launch {
    let mut rendezvous = Rendezvous::new("127.0.0.1", port).with_store(StoreHost::Launcher);
    if let Some(token) = token {
        rendezvous = rendezvous.with_token(token.clone());
    }
    Launch::new(Topology::new(rank, 2).unwrap(), rendezvous)
}

/// Joins and computes on a thread of its own. The outcome comes through the receiver.
fn join(launch: Launch) -> mpsc::Receiver<Result<[u32; 1]>> {
    let (sender, outcome) = mpsc::channel();
    thread::spawn(move || {
        let run = || {
            let options = GroupOptions::new().with_connect_timeout(DEADLINE);
            let group = ProcessGroup::connect(&launch, &options)?;
            let mut values = [1_u32];
            group.all_reduce(&mut values, ReduceOp::Sum)?;
            group.close()?;
            Ok(values)
        };
        // The receiver is gone only if the test has failed already.
        let _ = sender.send(run());
    });
    outcome
}

#[test]
fn a_recorded_handshake_opens_nothing() {
    let token = Token::generate().unwrap();
    let store = StoreServer::bind(("127.0.0.1", 0), 2, Some(token.clone())).unwrap();
    let real = store.local_addr();

    // Rank 1 joins through a tapped connection.
    let tap = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let through = tap.local_addr().unwrap().port();
    let (sender, recorded) = mpsc::channel();
    thread::spawn(move || {
        let (mut rank, _) = tap.accept().unwrap();
        let mut store = TcpStream::connect(real).unwrap();
        let (mut from, mut to) = (store.try_clone().unwrap(), rank.try_clone().unwrap());
        thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
        while let Some(message) = message(&mut rank) {
            // Only the first messages matter.
            let _ = sender.send(message.clone());
            if store.write_all(&message).is_err() {
                break;
            }
        }
    });
    let honest = join(launch(1, through, Some(&token)));
    let hello = recorded.recv_timeout(DEADLINE).unwrap();
    let register = recorded.recv_timeout(DEADLINE).unwrap();

    // The same messages go to the same store again, while it still waits for rank 0.
    let mut intruder = TcpStream::connect(real).unwrap();
    intruder.set_read_timeout(Some(DEADLINE)).unwrap();
    intruder.write_all(&hello).unwrap();
    let challenge = message(&mut intruder).unwrap();
    assert!(contains(&challenge, "Challenge"));
    intruder.write_all(&register).unwrap();
    let mut answer = Vec::new();
    let _ = intruder.read_to_end(&mut answer);
    assert!(!contains(&answer, "Welcome"), "the intruder was let in");
    assert!(
        contains(&answer, "token"),
        "{:?}",
        String::from_utf8_lossy(&answer)
    );

    // If the intruder had been taken for rank 1, there would be two of them and no job.
    let first = join(launch(0, real.port(), Some(&token)));
    for outcome in [first, honest] {
        assert_eq!(outcome.recv_timeout(DEADLINE).unwrap().unwrap(), [2]);
    }
}

#[cfg(unix)]
#[test]
fn a_token_file_of_others_or_of_another_kind_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    Token::generate().unwrap().write_file(&path).unwrap();
    for mode in [0o640, 0o604, 0o660, 0o644] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let error = Token::from_file(&path).unwrap_err();
        assert!(error.is_unauthorized(), "{error}");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("run chmod 600 on it"), "{cause}");
    }
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    assert!(Token::from_file(&path).is_ok());
    for strange in [folder.path(), std::path::Path::new("/dev/zero")] {
        assert!(Token::from_file(strange).unwrap_err().is_unauthorized());
    }
}

/// Needs root to run as another user, and does nothing without it.
#[cfg(target_os = "linux")]
#[test]
fn a_process_of_another_user_is_refused() {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    const PORT: &str = "INTRUDER_PORT";
    const NOBODY: u32 = 65_534;
    const NAME: &str = "intruders::a_process_of_another_user_is_refused";
    if let Ok(port) = std::env::var(PORT) {
        let outcome = join(launch(1, port.parse().unwrap(), None));
        let error = outcome.recv_timeout(DEADLINE).unwrap().unwrap_err();
        assert!(error.is_unauthorized(), "{error}");
        return;
    }
    let store = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
    let port = store.local_addr().port();
    // The user `nobody` cannot run the program itself if a folder above it is private.
    let folder = tempfile::Builder::new().tempdir_in("/tmp").unwrap();
    let program = folder.path().join("intruder");
    crate::copies::copy_program(&std::env::current_exe().unwrap(), &program);
    for path in [folder.path(), &program] {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let started = Command::new(&program)
        .args(["--exact", NAME, "--nocapture"])
        .env(PORT, port.to_string())
        .current_dir("/")
        .uid(NOBODY)
        .gid(NOBODY)
        .output();
    let Ok(output) = started else {
        let _ = writeln!(std::io::stderr(), "{NAME}: not run, since it takes root");
        return;
    };
    assert!(output.status.success(), "{output:?}");

    // The job is not affected.
    let ranks = [0, 1].map(|rank| join(launch(rank, port, None)));
    for outcome in ranks {
        assert_eq!(outcome.recv_timeout(DEADLINE).unwrap().unwrap(), [2]);
    }
}

/// Reads the next message of the rendezvous as a whole.
fn message(from: &mut TcpStream) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 16];
    from.read_exact(&mut bytes).ok()?;
    let len = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
    bytes.resize(16 + len, 0);
    from.read_exact(&mut bytes[16..]).ok()?;
    Some(bytes)
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes
        .windows(text.len())
        .any(|window| window == text.as_bytes())
}
