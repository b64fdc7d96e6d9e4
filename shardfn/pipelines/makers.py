BY_NAME={"gpipe":0,"1f1b":1}
