//! Progress bars as a terminal shows them.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// Shows a bar on each of two ranks, in a process that the tests below start.
#[test]
#[ignore = "a part of other tests"]
fn bars_in_a_child() {
    accelerator::launch(2, |accelerator| {
        let bar = accelerator.progress(3);
        bar.set_message(format!("of rank {}", accelerator.rank()));
        assert_eq!(bar.wrap_iter(0..3).count(), 3);
        bar.finish();
        accelerator.finish()
    })
    .unwrap();
}

fn child() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--ignored",
            "--exact",
            "progress::bars_in_a_child",
            "--nocapture",
        ])
        .env("TERM", "xterm")
        .env_remove("NO_COLOR")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

#[test]
fn a_terminal_shows_the_bar_of_rank_zero() {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap();
    let terminal = OpenOptions::new()
        .read(true)
        .write(true)
        .open(OsStr::from_bytes(name.as_bytes()))
        .unwrap();
    let mut command = child();
    command.stderr(terminal);
    let mut running = command.spawn().unwrap();
    // The command holds this side's last handle of the terminal: without it, reading ends with the child.
    drop(command);
    let (mut shown, mut chunk) = (Vec::new(), [0; 4096]);
    let mut controller = File::from(controller);
    while let Ok(count @ 1..) = controller.read(&mut chunk) {
        shown.extend_from_slice(&chunk[..count]);
    }
    assert!(running.wait().unwrap().success());
    let shown = String::from_utf8_lossy(&shown);
    assert!(
        shown.contains("3/3") && shown.contains("of rank 0"),
        "{shown:?}"
    );
    assert!(!shown.contains("of rank 1"), "{shown:?}");
}

#[test]
fn a_pipe_gets_no_bar() {
    let ended = child().stderr(Stdio::piped()).output().unwrap();
    assert!(ended.status.success());
    assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
}
