# Creates certificates in this directory with the names that GnuTLS clients expect: two authorities,
# and a server and a client, both for `localhost`, signed by the first.
set -e
key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
printf 'subjectAltName=DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n' > ext
for authority in ca other-ca; do
    openssl req -x509 $key -days 2 -subj /CN=$authority -keyout $authority-key.pem \
        -out $authority-cert.pem -addext keyUsage=critical,keyCertSign
done
for who in server client; do
    openssl req $key -subj /CN=$who -keyout $who-key.pem -out $who.csr
    openssl x509 -req -in $who.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial \
        -days 2 -extfile ext -out $who-cert.pem
done
