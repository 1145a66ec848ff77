//! A registry with token authentication: Debian's `docker-registry`, behind a small proxy that issues tokens and can stall in the
//! middle of a layer.

use crate::{Lab, Registry, Running, wait_until};

/// The address of the proxy, as in image references.
pub const TOKENS: &str = "login:5002";

/// Makes the key that signs tokens, and the certificate by which the registry verifies them.
const KEY: &str = "cd ~/tokens && openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=tokens -keyout key.pem -out cert.pem";
/// The status of a request without credentials.
const KNOCK: &str =
    "curl --silent --output /dev/null --write-out '%{http_code}' http://login:5002/v2/";
/// Prints a line for each request: method, path, range, status. While a file `halt` exists, it sends only the first half of a
/// layer.
const SERVER: &str = r#"
import base64, http.client, http.server, json, os, socket, subprocess, time, urllib.parse

KNOWN = "Basic " + base64.b64encode(b"user:right").decode()
PASSED_ON = ["Authorization", "Accept", "Range"]
PASSED_BACK = ["Content-Type", "Content-Length", "Content-Range", "Docker-Content-Digest", "WWW-Authenticate"]

def encoded(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=")

def signed(claims):
    certificate = "".join(open("cert.pem").read().split("-----")[2].split())
    header = {"typ": "JWT", "alg": "RS256", "x5c": [certificate]}
    text = b".".join(encoded(json.dumps(part).encode()) for part in (header, claims))
    sign = ["openssl", "dgst", "-sha256", "-sign", "key.pem"]
    signature = subprocess.run(sign, input=text, stdout=subprocess.PIPE, check=True).stdout
    return (text + b"." + encoded(signature)).decode()

class Server(http.server.BaseHTTPRequestHandler):
    def handle(self):
        # Who tries TLS first would wait for an answer to that.
        if self.connection.recv(1, socket.MSG_PEEK) != b"\x16":
            super().handle()

    def log_request(self, code="-", size="-"):
        print(self.command, self.path, self.headers.get("Range", "-"), int(code), flush=True)

    def do_GET(self):
        place = urllib.parse.urlsplit(self.path)
        if place.path == "/token":
            self.give_token(urllib.parse.parse_qs(place.query))
        else:
            self.pass_on()

    do_HEAD = do_GET

    def give_token(self, query):
        known = self.headers.get("Authorization")
        if known not in (None, KNOWN):
            return self.answer(401, {"details": "incorrect username or password"})
        # Who shows nothing gets a token that opens nothing.
        scopes = [scope.split(":") for scope in query.get("scope", []) if known]
        access = [{"type": kind, "name": name, "actions": actions.split(",")} for kind, name, actions in scopes]
        now = int(time.time())
        claims = {"iss": "lab", "sub": "user", "aud": query["service"][0], "iat": now, "nbf": now, "exp": now + 300,
                  "jti": str(time.time_ns()), "access": access}
        self.answer(200, {"token": signed(claims)})

    def answer(self, code, document):
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def pass_on(self):
        behind = http.client.HTTPConnection("login", 5003)
        shown = {name: ", ".join(self.headers.get_all(name)) for name in PASSED_ON if name in self.headers}
        behind.request(self.command, self.path, headers=shown)
        found = behind.getresponse()
        self.send_response(found.status)
        for name in PASSED_BACK:
            if found.getheader(name):
                self.send_header(name, found.getheader(name))
        self.end_headers()
        left = found.length or 0
        halts = left > 4 << 20 and os.path.exists("halt")
        if halts:
            left //= 2
        while left > 0 and (piece := found.read(min(left, 1 << 16))):
            self.wfile.write(piece)
            left -= len(piece)
        self.wfile.flush()
        while halts and os.path.exists("halt"):
            time.sleep(0.05)

http.server.ThreadingHTTPServer(("", 5002), Server).serve_forever()
"#;

/// A registry with token authentication, stopped on drop.
#[derive(Debug)]
pub struct TokenRegistry<'a> {
    lab: &'a Lab,
    server: Option<Running>,
    behind: Option<Running>,
}

impl Lab {
    /// Starts the registry, with the images that were pushed to another one.
    #[track_caller]
    pub fn token_registry(&self, images: &Registry<'_>) -> TokenRegistry<'_> {
        self.write("tokens/server.py", SERVER);
        self.sh(KEY).run().succeeded();
        let auth = format!(
            "{{realm: 'http://{TOKENS}/token', service: lab, issuer: lab, rootcertbundle: /home/user1/tokens/cert.pem}}"
        );
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             auth: {{token: {auth}}}\nhttp: {{addr: ':5003'}}\n",
            images.data()
        );
        let file = self.write("tokens/config.yml", &config);
        let behind = self.call(&["docker-registry", "serve", &file]).start();
        let server = self.sh("cd ~/tokens && exec /usr/bin/python3 server.py");
        let registry = TokenRegistry {
            lab: self,
            server: Some(server.start()),
            behind: Some(behind),
        };
        wait_until(20, "the registry demands a token", || {
            self.sh(KNOCK).run().stdout.trim() == "401"
        });
        registry
    }
}

impl TokenRegistry<'_> {
    /// The requests so far, one per line: method, path, range or `-`, status.
    pub fn answered(&self) -> String {
        let said = self.server.as_ref().map(Running::stdout);
        said.unwrap_or_default()
    }

    /// From now on, sends only half of a layer, and keeps the connection open.
    #[track_caller]
    pub fn halt(&self) {
        self.lab.write("tokens/halt", "");
    }

    /// Sends whole layers again.
    pub fn go_on(&self) {
        self.lab.remove("tokens/halt");
    }
}

impl Drop for TokenRegistry<'_> {
    fn drop(&mut self) {
        drop(self.server.take());
        drop(self.behind.take());
        self.lab.remove("tokens");
    }
}
