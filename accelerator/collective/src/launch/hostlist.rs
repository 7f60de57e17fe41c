//! Slurm's lists: of hosts, and of the tasks on each.
//!
//! ```text
//! hosts := item { ("," | space) item }      item  := text { "[" range {"," range} "]" text }
//! tasks := count { "," count }              range := digits [ "-" digits ]       count := number [ "(x" times ")" ]
//! ```

use super::reader::invalid;
use crate::error;

/// The hosts of a list as Slurm writes it, in its order; of several groups in brackets, the leftmost varies slowest.
///
/// ```
/// use accelerator_collective::launcher::expand_hosts;
///
/// # fn main() -> accelerator_collective::Result<()> {
/// assert_eq!(expand_hosts("rack[1-2]n[08-09],login")?, ["rack1n08", "rack1n09", "rack2n08", "rack2n09", "login"]);
/// assert!(expand_hosts("node[3-1]").unwrap_err().is_topology());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// A topology error that says what is wrong with the text, also if it names no host or more than 65,536.
pub fn expand_hosts(list: &str) -> error::Result<Vec<String>> {
    hosts(list).map_err(|error| invalid(format!("the list of hosts {list:?}: {error}")))
}

/// The hosts of a list such as `rack[1-2]n[08-10],login`, in its order; of several groups, the leftmost varies slowest.
///
/// # Errors
///
/// A text that says what is wrong with the list.
pub(super) fn hosts(list: &str) -> Result<Vec<String>, String> {
    let mut hosts = Vec::new();
    for item in items(list)? {
        hosts.extend(expand(item)?);
        if hosts.len() > MOST_HOSTS {
            return Err(too_many());
        }
    }
    match hosts.is_empty() {
        true => Err("it names no host".to_owned()),
        false => Ok(hosts),
    }
}

/// The counts of a list such as `2(x3),1`: 2, 2, 2, 1.
///
/// # Errors
///
/// A text that says what is wrong with the list.
pub(super) fn tasks_per_node(list: &str) -> Result<Vec<usize>, String> {
    let mut counts = Vec::new();
    for item in list.split(',') {
        let item = item.trim();
        let (count, times) = match item.split_once("(x") {
            None => (item, "1"),
            Some((count, rest)) => {
                let times = rest.strip_suffix(')');
                (count, times.ok_or_else(|| format!("{item:?} has no `)`"))?)
            }
        };
        let (count, times) = (number(count)?, number(times)?);
        if counts.len() + times > MOST_HOSTS {
            return Err(too_many());
        }
        counts.extend(std::iter::repeat_n(count, times));
    }
    Ok(counts)
}

/// The items of a list: separators within brackets do not part them.
fn items(list: &str) -> Result<Vec<&str>, String> {
    let mut items = Vec::new();
    let (mut start, mut is_inside) = (0, false);
    for (at, letter) in list.char_indices() {
        match letter {
            '[' if is_inside => return Err("a `[` stands within brackets".to_owned()),
            ']' if !is_inside => return Err("a `]` has no `[`".to_owned()),
            '[' | ']' => is_inside = letter == '[',
            _ if !is_inside && (letter == ',' || letter.is_ascii_whitespace()) => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if is_inside {
        return Err("a `[` has no `]`".to_owned());
    }
    items.push(&list[start..]);
    items.retain(|item| !item.is_empty());
    Ok(items)
}

/// The hosts of one item, whose brackets are whole.
fn expand(item: &str) -> Result<Vec<String>, String> {
    let Some((before, rest)) = item.split_once('[') else {
        return Ok(vec![item.to_owned()]);
    };
    let (ranges, after) = rest.split_once(']').unwrap_or((rest, ""));
    let endings = expand(after)?;
    let mut hosts = Vec::new();
    for range in ranges.split(',') {
        for number in numbers(range)? {
            for ending in &endings {
                hosts.push(format!("{before}{number}{ending}"));
            }
            if hosts.len() > MOST_HOSTS {
                return Err(too_many());
            }
        }
    }
    Ok(hosts)
}

/// The numbers of a range such as `08-10`, which are as wide as the first.
fn numbers(range: &str) -> Result<impl Iterator<Item = String>, String> {
    let (low, high) = range.split_once('-').unwrap_or((range, range));
    let width = low.len();
    if width > 20 {
        return Err(format!("the range {range:?} is too wide"));
    }
    let (low, high) = (number(low)?, number(high)?);
    if low > high {
        return Err(format!("the range {range:?} ends before it begins"));
    }
    Ok((low..=high).map(move |number| format!("{number:0width$}")))
}

fn number(text: &str) -> Result<usize, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = is_number.then(|| text.parse().ok()).flatten();
    number.ok_or_else(|| format!("{text:?} is no number"))
}

fn too_many() -> String {
    format!("it names more than {MOST_HOSTS} hosts")
}

/// The most hosts in a list, the same as Slurm's own bound.
const MOST_HOSTS: usize = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_listed_as_slurm_expands_them() {
        for (list, expected) in [
            ("tux", &["tux"][..]),
            ("tux[1-2]", &["tux1", "tux2"]),
            ("node[008-010]", &["node008", "node009", "node010"]),
            ("n[9-011]", &["n9", "n10", "n11"]),
            ("a[1-2]b[3-4]", &["a1b3", "a1b4", "a2b3", "a2b4"]),
            ("n[01,03]-ib", &["n01-ib", "n03-ib"]),
            ("b,a,b", &["b", "a", "b"]),
            ("b a\n\tc", &["b", "a", "c"]),
            ("login,n[2,1]", &["login", "n2", "n1"]),
        ] {
            assert_eq!(hosts(list).unwrap(), expected, "{list}");
        }
    }

    #[test]
    fn host_lists_that_are_wrong_are_errors() {
        for list in [
            "",
            ",",
            "n[3-1]",
            "n[1-2",
            "n1-2]",
            "n[1x3]",
            "n[5-]",
            "n[-5]",
            "n[]",
            "n[1,]",
            "n[[1]]",
            "n[1-70000]",
            "n[1-300]m[1-300]",
            "n[99999999999999999999]",
        ] {
            assert!(hosts(list).is_err(), "{list:?}");
        }
        assert_eq!(hosts("n[1-65536]").unwrap().len(), 65_536);
    }

    #[test]
    fn tasks_are_counted_node_by_node() {
        for (list, expected) in [
            ("4", &[4][..]),
            ("2(x3),1", &[2, 2, 2, 1]),
            ("1,2,1(x3),3,2", &[1, 2, 1, 1, 1, 3, 2]),
        ] {
            assert_eq!(tasks_per_node(list).unwrap(), expected, "{list}");
        }
        for list in ["", "2(x", "2(x)", "2(3)", "x", "1,,2", "2(x99999999)", "-1"] {
            assert!(tasks_per_node(list).is_err(), "{list:?}");
        }
    }
}
