//! Ranks learn from their launcher where they meet, through PMI-1.

use std::{
    collections::HashMap,
    env,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::{Arc, Barrier, Mutex},
    thread,
    time::{Duration, Instant},
};

use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp};

/// Acts as a rank if a launcher's address is set, and otherwise does nothing.
#[test]
fn a_rank() {
    if env::var_os("PMI_ID").is_none() {
        return;
    }
    let launch = Launch::from_env().unwrap();
    assert_eq!(launch.source().unwrap().launcher, "PMI");
    let options = GroupOptions::new().with_connect_timeout(Duration::from_secs(60));
    let group = ProcessGroup::connect(&launch, &options).unwrap();
    let mut sum = [group.rank() as f32];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [3.0]);
    group.close().unwrap();
}

#[test]
fn ranks_meet_where_their_launcher_tells() {
    const RANKS: usize = 3;
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let job = Arc::new((Mutex::new(HashMap::new()), Barrier::new(RANKS)));
    let mut ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            Command::new(env::current_exe().unwrap())
                .args(["--exact", "exchange::a_rank", "--nocapture"])
                .envs([("PMI_PORT", &*address), ("PMI_ID", &rank.to_string())])
                .stdin(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    listener.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut served = 0;
    let mut ended = Vec::new();
    while ended.len() < RANKS && Instant::now() < deadline {
        if let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(false).unwrap();
            let job = Arc::clone(&job);
            thread::spawn(move || serve(&stream, RANKS, &job));
            served += 1;
        }
        ranks.retain_mut(|rank| match rank.try_wait().unwrap() {
            Some(status) => {
                ended.push(status.success());
                false
            }
            None => true,
        });
        thread::sleep(Duration::from_millis(5));
    }
    for mut rank in ranks {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
    assert_eq!((served, ended), (RANKS, vec![true; RANKS]));
}

/// Plays the launcher for one rank.
fn serve(stream: &TcpStream, size: usize, job: &(Mutex<HashMap<String, String>>, Barrier)) {
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { return };
        let words: HashMap<&str, &str> = line
            .split(' ')
            .filter_map(|word| word.split_once('='))
            .collect();
        let answer = match words["cmd"] {
            "initack" => {
                let rank = words["pmiid"];
                format!("cmd=initack\ncmd=set size={size}\ncmd=set rank={rank}\ncmd=set debug=0")
            }
            "init" => "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0".to_owned(),
            "get_my_kvsname" => "cmd=my_kvsname kvsname=kvs_1".to_owned(),
            "put" => {
                let pair = (words["key"].to_owned(), words["value"].to_owned());
                job.0.lock().unwrap().extend([pair]);
                "cmd=put_result rc=0 msg=success".to_owned()
            }
            "barrier_in" => {
                job.1.wait();
                "cmd=barrier_out".to_owned()
            }
            "get" => format!(
                "cmd=get_result rc=0 msg=success value={}",
                job.0.lock().unwrap()[words["key"]]
            ),
            "finalize" => "cmd=finalize_ack".to_owned(),
            other => panic!("{other} is no command"),
        };
        let mut stream = stream;
        stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
    }
}
