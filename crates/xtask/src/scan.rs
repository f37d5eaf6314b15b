//! Rust source with its comments and literals blanked, so that a word found in the rest is code.
//! Line structure is kept. It recognizes comments (nested), strings (raw, byte, C), characters and
//! lifetimes, and nothing else of the language.

/// `text` with every comment and every literal replaced by spaces.
pub fn code_of(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skipped(&chars, at);
        if end == at {
            out.push(chars[at]);
            at += 1;
            continue;
        }
        out.extend(chars[at..end].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }));
        at = end;
    }
    out
}

/// Whether `code` contains `word` as a whole word.
pub fn has_word(code: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word)
        .any(|(at, _)| !code[..at].ends_with(part) && !code[at + word.len()..].starts_with(part))
}

/// The end of the comment or literal that starts at `at`; `at` itself if none starts there.
fn skipped(chars: &[char], at: usize) -> usize {
    let next = chars.get(at + 1);
    match chars[at] {
        '/' if next == Some(&'/') => find(chars, at, |c| c == '\n'),
        '/' if next == Some(&'*') => block_comment(chars, at),
        '"' => string(chars, at),
        'r' if !in_word(chars, at) => raw_string(chars, at),
        '\'' => character(chars, at),
        _ => at,
    }
}

fn find(chars: &[char], from: usize, wanted: impl Fn(char) -> bool) -> usize {
    (from..chars.len()).find(|&i| wanted(chars[i])).unwrap_or(chars.len())
}

/// Whether the character before `at` makes it the middle of a word; the prefixes `b` and `c` of
/// literals do not count.
fn in_word(chars: &[char], at: usize) -> bool {
    let before = |n: usize| at.checked_sub(n).map(|i| chars[i]);
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    match before(1) {
        Some('b' | 'c') => part(before(2)),
        other => part(other),
    }
}

fn block_comment(chars: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => {
                (depth, at) = (depth - 1, at + 2);
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    chars.len()
}

fn string(chars: &[char], start: usize) -> usize {
    let mut at = start + 1;
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

fn raw_string(chars: &[char], start: usize) -> usize {
    let open = find(chars, start + 1, |c| c != '#');
    if chars.get(open) != Some(&'"') {
        return start;
    }
    let hashes = open - start - 1;
    let closes = |i: usize| {
        chars[i] == '"' && chars[i + 1..].iter().take_while(|&&c| c == '#').count() >= hashes
    };
    (open + 1..chars.len()).find(|&i| closes(i)).map_or(chars.len(), |i| i + 1 + hashes)
}

/// A character literal; a lifetime is code.
fn character(chars: &[char], start: usize) -> usize {
    match (chars.get(start + 1), chars.get(start + 2)) {
        (Some('\\'), Some(_)) => (find(chars, start + 3, |c| c == '\'') + 1).min(chars.len()),
        (Some(_), Some('\'')) => start + 3,
        _ => start,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_in_comments_and_literals_are_not_code() {
        let hidden = [
            "// unsafe",
            "/* a /* nested */ unsafe */",
            "\"unsafe \\\" unsafe\"",
            "r#\"unsafe \" unsafe\"#",
            "br\"unsafe\"",
            "'\\''; // unsafe",
            "let unsafe_code = not_unsafe;",
        ];
        for text in hidden {
            assert!(!has_word(&code_of(text), "unsafe"), "{text}");
        }
        let shown = [
            "unsafe { f() }",
            "'\"'; unsafe {}",
            "fn f<'a>(x: &'a str) { unsafe {} }",
            "r\"\"; unsafe {}",
            "/* */ unsafe",
            "let r = for_r#unsafe;",
            "b'\"'; unsafe {}",
            "\"a\\\\\"; unsafe {}",
        ];
        for text in shown {
            assert!(has_word(&code_of(text), "unsafe"), "{text}");
        }
    }

    #[test]
    fn lines_stay_where_they_are() {
        let text = "a\n/* b\n c */ d\n\"e\n f\" g\n";
        assert_eq!(code_of(text).matches('\n').count(), text.matches('\n').count());
    }
}
