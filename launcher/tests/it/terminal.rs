//! Output on a terminal.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use crate::support::{Folder, wait_until};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// Opens a terminal: the side that displays and types, and the side of a program.
pub(crate) fn open_terminal() -> (File, File) {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap();
    let terminal = OpenOptions::new()
        .read(true)
        .write(true)
        .open(std::ffi::OsStr::from_bytes(name.as_bytes()))
        .unwrap();
    (File::from(controller), terminal)
}

/// Reads what a terminal shows until no process has it open any more, on a thread.
pub(crate) fn shown(mut controller: File) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let (mut shown, mut chunk) = (Vec::new(), [0; 4096]);
        // Reading ends with an error.
        while let Ok(count @ 1..) = controller.read(&mut chunk) {
            shown.extend_from_slice(&chunk[..count]);
        }
        String::from_utf8(shown).unwrap()
    })
}

/// Runs `command` with both streams on a terminal, and returns the terminal's output.
fn on_terminal(mut command: Command) -> String {
    let (controller, terminal) = open_terminal();
    command
        .stdin(Stdio::null())
        .stdout(terminal.try_clone().unwrap())
        .stderr(terminal)
        .env("TERM", "xterm");
    let mut child = command.spawn().unwrap();
    // The command holds this side's last handles of the terminal.
    drop(command);
    let reader = shown(controller);
    let status = wait_until("the launcher to end", || child.try_wait().unwrap());
    assert!(status.success(), "{status:?}");
    reader.join().unwrap()
}

#[test]
fn prefixes_are_coloured_on_a_terminal_only_and_if_wanted() {
    let folder = Folder::new();
    folder.script("talk.sh", "[ $RANK = 0 ] && echo hello; exit 0");
    let command = folder.command("-n 2 --quiet talk.sh");
    assert_eq!(on_terminal(command), "\x1b[36m[0]\x1b[0m hello\r\n");
    let mut command = folder.command("-n 2 --quiet talk.sh");
    command.env("NO_COLOR", "1");
    assert_eq!(on_terminal(command), "[0] hello\r\n");
}

#[test]
fn a_line_takes_the_place_of_another_ranks_progress() {
    let folder = Folder::new();
    // Text in a log is on its way to the terminal.
    folder.script(
        "talk.sh",
        "seen() { while ! grep -q \"$1\" logs/latest/rank-$2.log; do sleep 0.02; done; sleep 0.5; }\n\
         if [ $RANK = 0 ]; then printf '10%%\\r' >&2; seen hello 1; printf '20%%\\n' >&2; exit 0; fi\n\
         seen 10% 0; echo hello",
    );
    let mut command = folder.command("-n 2 --quiet --log-dir logs talk.sh");
    command.env("NO_COLOR", "1");
    assert_eq!(
        on_terminal(command),
        "[0] 10%\r\x1b[2K[1] hello\r\n[0] 20%\r\n"
    );
}
