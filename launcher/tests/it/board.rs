//! `accel-launch runs board`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Stdio;

use accelerator_track::Run;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::Folder;

#[test]
fn the_board_prints_its_address_and_shows_runs_until_it_is_ended() {
    let folder = Folder::new();
    let run = Run::builder("mnist").runs_folder(folder.path().join("runs"));
    let run = run.start().unwrap();
    run.log("train", [("loss", 0.5)], 1, None);
    run.finish().unwrap();
    let mut command = folder.command("runs board");
    command.stdout(Stdio::piped());
    command.stderr(Stdio::piped());
    let mut board = command.spawn().unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(board.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    let (address, token) = line
        .trim()
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once("/?token="))
        .unwrap_or_else(|| panic!("no address: {line}"));
    let get = |path: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(get("/").starts_with("HTTP/1.1 403 "));
    assert!(get(&format!("/?token={token}")).contains("<div id=\"app\">"));
    crate::support::wait_until("the run is read", || {
        let runs = get(&format!("/data?token={token}"));
        (runs.contains("train/loss") && runs.contains("\"finished\"")).then_some(())
    });
    let pid = Pid::from_child(&board);
    kill_process(pid, Signal::TERM).unwrap();
    let status = board.wait().unwrap();
    assert!(!status.success());
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "", "the address is printed once");
    let mut said = String::new();
    let mut errors = board.stderr.take().unwrap();
    errors.read_to_string(&mut said).unwrap();
    assert!(
        said.contains(
            "open this address in a browser to see the runs in runs; Ctrl-C ends the board"
        ),
        "{said}"
    );
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let folder = Folder::new();
    let ended = folder.launch("runs board --runs nowhere").expect(2);
    ended.says("there is no folder nowhere");
}
