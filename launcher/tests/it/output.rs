//! The ranks' output: prefixes, log files, odd bytes, readers that leave.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::support::{Folder, LONG_SLEEP, Run, wait_until, wait_until_dead};

#[test]
fn lines_are_prefixed_by_rank() {
    let folder = Folder::new();
    folder.script(
        "talk.sh",
        "echo out one; echo out two; echo err >&2; printf unfinished",
    );
    let ended = folder.launch("-n 2 --quiet talk.sh").expect(0);
    assert_eq!(
        ended.sorted(),
        [
            "[0] out one",
            "[0] out two",
            "[0] unfinished",
            "[1] out one",
            "[1] out two",
            "[1] unfinished"
        ]
    );
    let mut errors: Vec<&str> = ended.stderr.lines().collect();
    errors.sort_unstable();
    assert_eq!(errors, ["[0] err", "[1] err"]);
}

#[test]
fn one_rank_or_no_prefix_leaves_lines_alone() {
    let folder = Folder::new();
    folder.script("talk.sh", "echo \"rank $RANK\"");
    assert_eq!(folder.ok("-n 1 talk.sh"), "rank 0\n");
    assert_eq!(
        folder.launch("-n 2 --no-prefix talk.sh").expect(0).sorted(),
        ["rank 0", "rank 1"]
    );
}

#[test]
fn lines_of_ranks_do_not_mix() {
    let folder = Folder::new();
    let body = "i=0; while [ $i -lt 300 ]; do printf 'a%s' $RANK; printf 'b%s' $RANK; echo 'c' $i; i=$((i + 1)); done";
    folder.script("talk.sh", body);
    let text = folder.ok("-n 3 talk.sh");
    for rank in 0..3 {
        let prefix = format!("[{rank}] ");
        let lines: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix(&prefix))
            .collect();
        let expected: Vec<String> = (0..300).map(|i| format!("a{rank}b{rank}c {i}")).collect();
        assert_eq!(lines, expected);
    }
    assert_eq!(text.lines().count(), 900);
}

#[test]
fn odd_bytes_and_long_lines_pass_unharmed() {
    let folder = Folder::new();
    folder.script("talk.sh", "printf '\\000\\377\\200x\\r\\n'; head -c 3000000 /dev/zero | tr '\\0' y; echo; printf '\\376'");
    let mut expected = b"\0\xff\x80x\r\n".to_vec();
    expected.extend(std::iter::repeat_n(b'y', 3_000_000));
    expected.extend(b"\n\xfe");
    assert!(
        folder.launch("-n 1 talk.sh").expect(0).stdout == expected,
        "one rank's bytes are untouched"
    );

    let stdout = folder.launch("-n 2 talk.sh").expect(0).stdout;
    for prefix in [b"[0] ", b"[1] "] {
        let lines: Vec<&[u8]> = stdout
            .split_inclusive(|&byte| byte == b'\n')
            .filter(|line| line.starts_with(prefix))
            .collect();
        let own: Vec<u8> = lines
            .iter()
            .flat_map(|line| line[4..].iter().copied())
            .collect();
        // The launcher ends the last, unfinished line, so that the next one stays separate.
        assert!(
            own.strip_suffix(b"\n") == Some(&expected[..]),
            "a rank's lines are untouched"
        );
    }
}

#[test]
fn a_job_continues_where_its_output_cannot_be_written() {
    let folder = Folder::new();
    folder.script("talk.sh", "echo said; echo $RANK >> ran");
    let command = folder.command("-n 2 talk.sh");
    let full = std::fs::File::options().write(true).open("/dev/full");
    let ended = Run::start_into(command, full.unwrap().into()).end();
    ended.expect(0).says("the job continues without it");
    assert_eq!(folder.wait_for_lines("ran", 2).len(), 2);
}

#[test]
fn logs_hold_both_streams_of_each_rank() {
    let folder = Folder::new();
    folder.script("talk.sh", "echo out $RANK; echo err $RANK >&2; printf end");
    for ranks in ["1", "2"] {
        folder
            .launch(&format!("-n {ranks} --log-dir logs/deep talk.sh"))
            .expect(0);
        let count: usize = ranks.parse().unwrap();
        for rank in 0..count {
            let text = folder.read(&format!("logs/deep/latest/rank-{rank}.log"));
            assert!(text.contains(&format!("out {rank}\n")), "{text:?}");
            assert!(text.contains(&format!("err {rank}\n")), "{text:?}");
            assert!(text.contains("end"), "{text:?}");
            assert!(!text.contains('['), "{text:?}");
        }
        assert_eq!(
            folder.path().join("logs/deep/latest/rank-1.log").exists(),
            count == 2
        );
    }
}

/// Each run has a folder of its own, and `latest` points to the last one.
#[test]
fn logs_of_earlier_runs_stay() {
    let folder = Folder::new();
    folder.write("logs/rank-0.log", "of an older launcher\n");
    folder.script("talk.sh", "cat words");
    let mut seen = Vec::new();
    for words in ["first\n", "second\n", "third\n"] {
        folder.write("words", words);
        folder.launch("-n 1 --log-dir logs talk.sh").expect(0);
        seen.push(words.to_owned());
        assert_eq!(folder.read("logs/latest/rank-0.log"), words);
        let runs = folder.path().join("logs").read_dir().unwrap();
        let is_run = |path: &std::path::PathBuf| path.is_dir() && !path.is_symlink();
        let mut runs: Vec<_> = runs.map(|entry| entry.unwrap().path()).collect();
        runs.retain(is_run);
        runs.sort();
        let logs = runs.iter().map(|run| run.join("rank-0.log"));
        let found: Vec<_> = logs
            .map(|log| std::fs::read_to_string(log).unwrap())
            .collect();
        assert_eq!(found, seen, "in the order of their names: {runs:?}");
    }
    assert_eq!(folder.read("logs/rank-0.log"), "of an older launcher\n");
}

#[test]
fn a_file_called_latest_is_not_replaced() {
    let folder = Folder::new();
    folder.script("talk.sh", "echo hello");
    folder.write("folder/latest/mine", "text");
    folder.write("file/latest", "text");
    for logs in ["folder", "file"] {
        folder
            .launch(&format!("-n 1 --log-dir {logs} talk.sh"))
            .expect(0)
            .says(&format!("{logs}/latest cannot lead to them"));
    }
    assert_eq!(folder.read("folder/latest/mine"), "text");
    assert_eq!(folder.read("file/latest"), "text");
}

#[test]
fn a_reader_that_leaves_ends_the_job_quietly() {
    for ranks in ["1", "2"] {
        let folder = Folder::new();
        folder.script(
            "talk.sh",
            "echo $$ >> pids; while :; do echo line; sleep 0.01; done",
        );
        let mut command = folder.command(&format!("-n {ranks} talk.sh"));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut first = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut first).unwrap();
        let pids = folder.wait_for_lines("pids", ranks.parse().unwrap());
        drop(stdout);
        let status = wait_until("the launcher to end", || child.try_wait().unwrap());
        assert_eq!(status.code(), Some(141));
        let stderr = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert_eq!(stderr, "");
        pids.iter().for_each(|pid| wait_until_dead(pid));
    }
}

#[test]
fn output_that_is_read_slowly_is_not_cut() {
    let folder = Folder::new();
    folder.script("talk.sh", "i=0; while [ $i -lt 4000 ]; do echo a line that is long enough to fill the pipe of the reader; i=$((i + 1)); done; echo last");
    let mut command = folder.command("-n 2 talk.sh");
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // The time is longer than the launcher waits for a silent stream.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let text = std::io::read_to_string(child.stdout.take().unwrap()).unwrap();
    assert_eq!(text.lines().count(), 8002);
    assert_eq!(
        text.lines().filter(|line| line.ends_with("last")).count(),
        2
    );
    assert_eq!(
        wait_until("the launcher to end", || child.try_wait().unwrap()).code(),
        Some(0)
    );
}

#[test]
fn a_stream_held_by_an_escaped_process_is_left() {
    let folder = Folder::new();
    folder.script(
        "talk.sh",
        &format!("echo done; setsid {LONG_SLEEP} & echo $! >> pids"),
    );
    // The escaped processes hold the pipes of the ranks, not this test's.
    let ended = folder.launch("-n 2 talk.sh");
    assert_eq!(ended.expect(0).sorted(), ["[0] done", "[1] done"]);
}
