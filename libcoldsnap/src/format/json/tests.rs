use proptest::prelude::*;

use super::*;

fn canonical(text: &str) -> String {
    Json::parse(text.as_bytes()).unwrap().canonical()
}

#[test]
fn keeps_what_serde_json_would_change() {
    for (text, expected) in [
        ("35399562948360463058890781895381311971", "35399562948360463058890781895381311971"),
        ("-9223372036854775809", "-9223372036854775809"),
        ("-0", "0"),
        ("-0.0", "-0.0"),
        // A float that a fast parser reads one unit off.
        ("122.416294033786585", "122.41629403378658"),
        ("1E2", "100.0"),
        ("1e-5", "1e-05"),
        (r#""\ud83d\ude00\/""#, r#""\ud83d\ude00/""#),
        (r#" { "b" : [ ] , "a" : { } } "#, r#"{"a":{},"b":[]}"#),
    ] {
        assert_eq!(canonical(text), expected);
    }
}

#[test]
fn refuses_what_is_not_one_value() {
    for text in [
        "",
        " ",
        "nul",
        "[1,]",
        "[1 2]",
        "{\"a\"}",
        "{a:1}",
        "{\"a\":1,}",
        "01",
        "1.",
        ".5",
        "+1",
        "1e",
        "-",
        "1e999",
        "NaN",
        "Infinity",
        "\"",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\u12g4\"",
        "\"\\u+123\"",
        "\"\\ud800\"",
        "\"\\ud800\\u0041\"",
        "\"\\udc00\"",
        "\"a\nb\"",
        "1 2",
        "[",
        "{\"a\":1",
        "tru",
        "\u{feff}1",
    ] {
        assert!(Json::parse(text.as_bytes()).is_err(), "{text}");
    }
    assert!(Json::parse(b"\"\xff\"").unwrap_err().problem.contains("UTF-8"));
    let error = Json::parse(br#"{"a":1,"\u0061":2}"#).unwrap_err();
    assert_eq!((error.offset, error.problem.as_str()), (7, "the key \"a\" is there twice"));
}

#[test]
fn depth_is_limited_like_in_serde_json() {
    for depth in [MAX_DEPTH, MAX_DEPTH + 1] {
        let text = "[".repeat(depth) + &"]".repeat(depth);
        assert_eq!(Json::parse(text.as_bytes()).is_ok(), depth == MAX_DEPTH);
        assert_eq!(serde_json::from_str::<Value>(&text).is_ok(), depth == MAX_DEPTH);
    }
    assert!(Json::parse("[".repeat(1 << 20).as_bytes()).is_err());
}

#[test]
fn integers_beyond_64_bits_are_located() {
    let first = |text: &str| Json::parse(text.as_bytes()).unwrap().first_beyond_64_bits();
    assert_eq!(first("[18446744073709551615, -9223372036854775808]"), None);
    assert_eq!(first(r#"{"a":[1,{"b":18446744073709551616}]}"#).as_deref(), Some("a[1].b"));
    assert_eq!(first("[[-9223372036854775809]]").as_deref(), Some("[0][0]"));
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_filter("finite", |f| f.is_finite()).prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 64, 8, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
            proptest::collection::btree_map(any::<String>(), inner, 0..8)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn both_texts_read_back(value in values()) {
        let json = Json::from(&value);
        for text in [json.canonical(), json.document(), value.to_string()] {
            let read = Json::parse(text.as_bytes()).unwrap();
            prop_assert_eq!(&read, &json);
            prop_assert_eq!(&serde_json::from_str::<Value>(&text).unwrap(), &value);
        }
    }
}
